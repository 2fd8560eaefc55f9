"""Weights for an engine in another process: a model folder on the memory disk, written anew at each update."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenpo.models.lora import is_adapted, merged_state

MEMORY_DISK = Path("/dev/shm")
WEIGHTS = "model.safetensors"


class Handover:
    """A folder that holds the model as the engine loads it. ``close`` removes it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        place = MEMORY_DISK if MEMORY_DISK.is_dir() else None
        self.folder = Path(tempfile.mkdtemp(prefix="kenpo-engine-", dir=place))
        self.model = model
        tokenizer.save_pretrained(self.folder)

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put these weights in place, whole or not at all. A tied head is written too, so that it can't stay behind."""
        from safetensors.torch import save_file

        tensors = {n: t.detach().to("cpu", copy=False).contiguous() for n, t in weights}
        self._write_config(tensors)
        seen: set[int] = set()
        for name, tensor in tensors.items():
            if tensor.data_ptr() in seen:
                tensors[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        fresh = self.folder / (WEIGHTS + ".new")
        save_file(tensors, str(fresh), metadata={"format": "pt"})
        fresh.replace(self.folder / WEIGHTS)

    def _write_config(self, tensors: dict[str, Tensor]) -> None:
        """The configuration; a head that a merged adapter parted from the embedding is no longer called tied."""
        own = copy.deepcopy(self.model.config)
        embedding = next(
            (n for n, p in self.model.named_parameters() if p is self.model.get_input_embeddings().weight), ""
        )
        head, beside = tensors.get("lm_head.weight"), tensors.get(embedding.replace(".base_layer", ""))
        if head is not None and beside is not None and not torch.equal(head, beside):
            own.tie_word_embeddings = False
        own.architectures = [type(getattr(self.model, "module", self.model)).__name__]
        own.save_pretrained(self.folder)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def present_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What the model holds now, an adapter added in."""
    yield from (merged_state(model) if is_adapted(model) else model.state_dict()).items()
