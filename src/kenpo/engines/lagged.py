"""Sampling with older weights, simulated exactly on one machine: batch n with those after batch n − 1 − K."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kenpo.engines.base import Done, Engine, Request, Weights
from kenpo.engines.hf import HFEngine
from kenpo.engines.room import free_memory
from kenpo.episode import Episode
from kenpo.errors import InputError

#: Share of the free memory that older weights may take; beyond it they are kept in files.
SHARE = 0.25


class Kept(NamedTuple):
    """Weights as they were: the trained parameters in order, or the file that holds them."""

    version: int
    tensors: list[Tensor] | None
    file: Path | None = None


class LaggedEngine(Engine):
    """`HFEngine` whose samples come from the weights of K updates of the engine ago; ``lag`` K is at least 1.

    `update` keeps a copy of the trained parameters. The newest K + 1 are held, and `sample` reads the oldest of them
    (the start's while there are fewer): the module's parameters point to these while it samples and to the trained ones
    again afterwards, whatever happens meanwhile. ``version`` is that of the weights that sample, and so stands on their
    segments. ``present`` is the engine of the trained weights. ``room`` copies are held in memory (default: those that
    fit a quarter of what is free), the others in a folder of their own until the engine is closed.
    """

    def __init__(self, present: HFEngine, lag: int, sampler: Engine | None = None, room: int | None = None) -> None:
        if lag < 1:
            raise InputError(f"lag: {lag} is below 1; without lag the engine itself samples")
        self.present, self.lag, self.sampler = present, lag, sampler or present
        self.trained = [(n, p) for n, p in present.model.named_parameters() if p.requires_grad]
        self.room = self._room() if room is None else room
        self.folder: Path | None = None
        self.written = 0
        self.kept: list[Kept] = []
        self._keep(present.version)

    @property
    def version(self) -> int:  # type: ignore[override]
        """Of the weights that sample."""
        return self.kept[0].version

    def update(self, weights: Weights, version: int) -> None:
        """The module holds new weights: keep a copy of them, forget the oldest."""
        self.present.update(weights, version)
        self._keep(version)

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        """As `HFEngine.sample`, with the oldest weights held."""
        with self._swapped(self.kept[0]):
            return self.sampler.sample(requests, done)

    def close(self) -> None:
        """Remove the files."""
        self.present.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    # -- a checkpoint's part ------------------------------------------------------------------------------------------

    def state(self) -> Any:
        """All weights held, oldest first."""
        held = [{"version": k.version, "tensors": list(self._tensors(k))} for k in self.kept]
        return {"names": [n for n, _ in self.trained], "held": held}

    def load(self, state: Any) -> None:
        """Take up what `state` gave. InputError if it belongs to other parameters."""
        if not isinstance(state, dict) or state.get("names") != [n for n, _ in self.trained]:
            raise InputError("the checkpoint holds no older weights of this model; resume with the --lag it ran with")
        self.kept = []
        for entry in state["held"]:
            self._hold(
                int(entry["version"]), [t.to(p) for t, (_, p) in zip(entry["tensors"], self.trained, strict=True)]
            )

    # -- small things -------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many copies memory is taken for."""
        each = sum(p.numel() * p.element_size() for _, p in self.trained)
        free = free_memory(self.trained[0][1].device) if self.trained else None
        return self.lag + 1 if free is None else int(SHARE * free) // max(1, each)

    def _keep(self, version: int) -> None:
        self._hold(version, [p.detach().clone() for _, p in self.trained])

    def _hold(self, version: int, tensors: list[Tensor]) -> None:
        for old in self.kept[: max(0, len(self.kept) - self.lag)]:
            if old.file is not None:
                old.file.unlink(missing_ok=True)
        self.kept = self.kept[max(0, len(self.kept) - self.lag) :]
        in_memory = sum(k.file is None for k in self.kept)
        self.kept.append(Kept(version, tensors) if in_memory < self.room else Kept(version, None, self._write(tensors)))

    def _write(self, tensors: list[Tensor]) -> Path:
        from safetensors.torch import save_file

        self.folder = self.folder or Path(tempfile.mkdtemp(prefix="kenpo-lag-"))
        self.written += 1
        file = self.folder / f"{self.written}.safetensors"
        save_file({str(i): t.contiguous() for i, t in enumerate(tensors)}, str(file))
        return file

    def _tensors(self, kept: Kept) -> list[Tensor]:
        if kept.tensors is not None:
            return kept.tensors
        from safetensors.torch import load_file

        found = load_file(str(kept.file))
        return [found[str(i)].to(p) for i, (_, p) in enumerate(self.trained)]

    @contextlib.contextmanager
    def _swapped(self, kept: Kept) -> Iterator[None]:
        """Within it the module holds these weights, and calls itself by their version."""
        own = [p.data for _, p in self.trained]
        version, old = self.present.version, self._tensors(kept)
        try:
            for (_, p), tensor in zip(self.trained, old, strict=True):
                p.data = tensor
            self.present.version = self.sampler.version = kept.version
            yield
        finally:
            for (_, p), tensor in zip(self.trained, own, strict=True):
                p.data = tensor
            self.present.version = self.sampler.version = version
