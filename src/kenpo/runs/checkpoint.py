"""Checkpoints: an ordinary transformers model folder with a ``trainer/`` folder beside the weights.

``trainer/optimizer.safetensors`` holds moments, master weights and the RNG states of torch; ``trainer/state.json`` the
step, the state of the algorithm and of the source and how far the run's files had been written; tensors of those states
lie in ``trainer/state.safetensors``. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.models.lora import is_adapted, merged_state, save_adapter
from kenpo.models.value_head import ScalarHeads, save_heads
from kenpo.nested import join, split
from kenpo.runs.disk import disk_errors, remove_tree, sync_folder, sync_tree

FORMAT = 2
_NAME = re.compile(r"step_(\d{6,})")


#: Parts of the state that may hold tensors.
NESTED = ("source", "algorithm", "engine")


@dataclass
class TrainerState:
    """Where a run stands, after ``step`` whole steps."""

    step: int = 0
    source: Any = None  # what `Collected.state` handed on
    algorithm: Any = None  # what `Prepared.state` handed on
    engine: Any = None  # what `Engine.state` handed on
    updates: int = 0  # optimizer updates of the policy so far: the version of its weights
    tokens: dict[str, int] = field(default_factory=lambda: {"generated": 0, "filtered": 0, "trained": 0})
    evals: dict[str, float | None] = field(default_factory=lambda: {"before": None, "after": None})
    seconds: float = 0.0
    files: dict[str, int] = field(default_factory=dict)  # bytes written to metrics.jsonl and samples.jsonl
    ranks: int = 1
    threads: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    clock: float = 0.0  # the moment that chat templates read, in seconds since the epoch
    stands_on: dict[str, Any] = field(default_factory=dict)  # digests of data, files and models
    best: dict[str, Any] = field(default_factory=dict)  # figure, value and step of the best checkpoint, if one is kept


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    found = {"python": sys.version.split()[0]}
    for name in ("kenpo", "torch", "transformers", "tokenizers", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def rng_tensors() -> dict[str, Tensor]:
    """The states of torch's global generators."""
    states = {"rng.torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"rng.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def rng_json() -> dict[str, Any]:
    """The states of Python's and, if it is loaded, NumPy's global generators."""
    states: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        import numpy

        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, [int(k) for k in keys], *rest]
    return states


def seed_rng(seed: int) -> None:
    """Start all global generators of a fresh run, for user code that draws from them; Kenpo's own samples do not."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed % 2**32)


def restore_rng(tensors: dict[str, Tensor], states: dict[str, Any]) -> None:
    """Put all global generators back. Call it last: nothing may seed them afterwards."""
    torch.set_rng_state(tensors["rng.torch"])
    cuda = [tensors[n] for n in sorted(tensors) if n.startswith("rng.cuda.")]
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)
    kind, keys, gauss = states["python"]
    random.setstate((kind, tuple(keys), gauss))
    if "numpy" in states:
        import numpy

        numpy.random.set_state(tuple(states["numpy"]))


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """A model folder that transformers opens; a tied head is written out too: some engines would keep a stale one. An
    adapter is merged into the weights that are written."""
    from transformers.utils import logging

    tensors = merged_state(model) if is_adapted(model) else dict(model.state_dict())
    tied = {t.data_ptr() for n, t in tensors.items() if n != "lm_head.weight"}
    if "lm_head.weight" in tensors and tensors["lm_head.weight"].data_ptr() in tied:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with untied_if_apart(model, tensors):
            model.save_pretrained(folder, state_dict=tensors)
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def untied_if_apart(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within it the configuration calls a head tied only if it equals the embedding: an adapter on the embedding, once
    merged, parts the two."""
    embedding = next((n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight), None)
    head = tensors.get("lm_head.weight")
    beside = None if embedding is None else tensors.get(embedding.replace(".base_layer", ""))
    apart = head is not None and beside is not None and not torch.equal(head, beside)
    holders = list({id(c): c for c in (model.config, model.config.get_text_config())}.values())
    kept = [getattr(c, "tie_word_embeddings", None) for c in holders]
    try:
        if apart:
            for c in holders:
                c.tie_word_embeddings = False
        yield
    finally:
        for c, tied in zip(holders, kept, strict=True):
            if tied is not None:
                c.tie_word_embeddings = tied


@dataclass(frozen=True)
class Part:
    """A further model that a run trains, a critic: it lies in a folder of its own inside each checkpoint."""

    folder: str
    model: Any
    heads: ScalarHeads
    optimizer: dict[str, Tensor]


def save_part(checkpoint: Path, part: Part, tokenizer: Any, adapter_only: bool) -> None:
    """``FOLDER/``: a model folder with its scalar heads, ``trainer/adapter`` if it has one (or that alone), and the
    optimizer's state in ``trainer/optimizer.safetensors``."""
    from safetensors.torch import save_file

    folder = checkpoint / part.folder
    (folder / "trainer").mkdir(parents=True)
    save_heads(part.heads, folder)
    adapted = is_adapted(part.model)
    if not (adapted and adapter_only):
        save_model(folder, part.model, tokenizer)
    if adapted:
        save_adapter(part.model, folder / "trainer" / "adapter")
    save_file(part.optimizer, str(folder / "trainer" / "optimizer.safetensors"))


def load_part(checkpoint: Path, folder: str) -> dict[str, Tensor]:
    """The optimizer's state of the part in `folder`. InputError if it is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = checkpoint / folder / "trainer" / "optimizer.safetensors"
    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: can't be read{hint(checkpoint)} ({error})") from None


def save_checkpoint(
    checkpoints: Path,
    state: TrainerState,
    model: Any,
    tokenizer: Any,
    optimizer: dict[str, Tensor],
    adapter_only: bool = False,
    heads: ScalarHeads | None = None,
    part: Part | None = None,
) -> Path:
    """Write ``step_NNNNNN`` whole or not at all. `RunError` if the disk refuses; older checkpoints are untouched.

    A model with an adapter is written merged, with the adapter under ``trainer/adapter``; or as the adapter alone.
    Scalar heads lie beside the weights in a file of their own, a further `part` in a folder of its own.
    """
    from safetensors.torch import save_file

    target = checkpoints / f"step_{state.step:06d}"
    temporary = checkpoints / f"{target.name}.tmp"
    with disk_errors(f"checkpoint {target.name}"):
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            (temporary / "trainer").mkdir(parents=True)
            if heads:
                save_heads(heads, temporary)
            if adapter_only:
                save_adapter(model, temporary)
                tokenizer.save_pretrained(temporary)
            else:
                save_model(temporary, model, tokenizer)
                if is_adapted(model):
                    save_adapter(model, temporary / "trainer" / "adapter")
            save_file({**optimizer, **rng_tensors()}, str(temporary / "trainer" / "optimizer.safetensors"))
            if part is not None:
                save_part(temporary, part, tokenizer, adapter_only)
            nested, tensors = split({n: getattr(state, n) for n in NESTED}, "state")
            save_file(tensors, str(temporary / "trainer" / "state.safetensors"))
            plain = {f.name: getattr(state, f.name) for f in fields(state)}
            record = {"format": FORMAT, **plain, **nested, "rng": rng_json()}
            (temporary / "trainer" / "state.json").write_text(json.dumps(record))
            sync_tree(temporary)
            if target.exists():
                remove_tree(target)
            os.replace(temporary, target)
            sync_folder(checkpoints)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def found(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    named = [(int(m[1]), p) for p in checkpoints.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [p for _, p in sorted(named)]


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint by its name; 0 without one."""
    return int(checkpoint.name.removeprefix("step_")) if checkpoint else 0


def prune(checkpoints: Path, keep: int, spare: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints (0: keep all) and the one of step `spare`."""
    for old in found(checkpoints)[:-keep] if keep else []:
        if step_of(old) != spare:
            remove_tree(old)


def sweep(checkpoints: Path) -> None:
    """Remove what interrupted writes left behind."""
    if checkpoints.is_dir():
        for leftover in checkpoints.glob("*.tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)


def hint(checkpoint: Path) -> str:
    """What to do about a checkpoint that can't be used: there may be an older one."""
    whole = found(checkpoint.parent)
    older = whole[: whole.index(checkpoint)] if checkpoint in whole else []
    return f"; remove that folder and resume, which goes on from {older[-1].name}" if older else ""


@contextlib.contextmanager
def usable(checkpoint: Path) -> Iterator[None]:
    """An error about the checkpoint's model also says what to do about the checkpoint."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error}{hint(checkpoint)}") from None


def check_kinds(record: dict[str, Any], rng: Any) -> None:
    """TypeError for a value of another kind than a trainer writes."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int, "seconds": (int, float), "ranks": int, "threads": int, "tokens": dict, "evals": dict,
        "files": dict, "versions": dict, "stands_on": dict, "best": dict,
    }  # fmt: skip
    for name, kind in kinds.items():
        value = record.get(name)
        if name in record and (not isinstance(value, kind) or isinstance(value, bool)):
            raise TypeError(f"{name} is {value!r}")
    for name in ("tokens", "files"):
        for key, value in record.get(name, {}).items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}.{key} is {value!r}")
    if record.get("step", 0) < 0:
        raise TypeError(f"step is {record['step']}")
    try:
        kind, keys, gauss = rng["python"]
        random.Random().setstate((kind, tuple(keys), gauss))
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        raise TypeError(f"rng can't be restored: {error}") from None


def recorded_clock(checkpoint: Path) -> float | None:
    """The moment that the run's chat templates read; None where the checkpoint doesn't say."""
    try:
        found = json.loads((checkpoint / "trainer" / "state.json").read_text()).get("clock")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None  # loading it says in full what is wrong
    return float(found) if isinstance(found, int | float) and found > 0 else None


def load_state(checkpoint: Path) -> tuple[TrainerState, dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's (state, tensors, RNG states for `restore_rng`). InputError if it was not written by a trainer."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    unusable = f"{checkpoint}: not a checkpoint that training can go on from{hint(checkpoint)}"
    try:
        record = json.loads((checkpoint / "trainer" / "state.json").read_text())
        tensors = load_file(str(checkpoint / "trainer" / "optimizer.safetensors"))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise InputError(f"{unusable} ({error})") from None
    if not isinstance(record, dict):
        raise InputError(f"{unusable} (state.json holds no object)")
    written = record.pop("format", None)
    if written != FORMAT:
        raise InputError(f"{checkpoint}: written in format {written}, this version reads {FORMAT}")
    try:
        parts = load_file(str(checkpoint / "trainer" / "state.safetensors"))
    except (OSError, SafetensorError) as error:
        raise InputError(f"{unusable} ({error})") from None
    try:
        rng = record.pop("rng")
        record |= {name: join(record[name], parts) for name in NESTED}
        check_kinds(record, rng)
        return TrainerState(**record), {"rng.torch": tensors.pop("rng.torch"), **tensors}, rng
    except (KeyError, TypeError) as error:
        raise InputError(f"{unusable} (what it holds is incomplete or foreign: {error})") from None
