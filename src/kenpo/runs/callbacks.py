"""What a run tells its onlookers, and the onlookers that turn it into files of other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kenpo.errors import InputError, unknown_name
from kenpo.runs.figures import scalars


class Described(Protocol):
    """What onlookers may ask of a run's configuration."""

    @property
    def algorithm(self) -> str:
        """Its algorithm by name or file."""
        ...

    @property
    def grad_clip(self) -> float:
        """The largest norm of its gradient; 0: no limit."""
        ...

    @property
    def task(self) -> str:
        """What it learns from."""
        ...

    @property
    def verifier(self) -> str | tuple[str, ...] | None:
        """What judges it."""
        ...

    @property
    def model(self) -> str:
        """The model it starts from."""
        ...

    @property
    def steps(self) -> int | None:
        """Its length in rollout batches."""
        ...


class Callback:
    """Base of callbacks: override what you want to hear. Called on the first rank only, after the files are written."""

    def on_start(self, config: Described, path: Path, step: int) -> None:
        """The run begins, or goes on after `step` steps."""

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        """A step is done; `figures` is its line of ``metrics.jsonl``."""

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        """Held-out accuracy was measured after `step` steps (0: before training)."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over; None if it did not reach its end."""


class TensorBoard(Callback):
    """Event files under ``RUN/tensorboard``."""

    def on_start(self, config: Described, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(path / "tensorboard"), purge_step=step + 1 if step else None)

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        for name, value in scalars(figures).items():
            self.writer.add_scalar(name, value, step)

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        if step == 0:
            self.on_step(step, figures)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


class Tracker(Callback):
    """wandb, or trackio, which has the same functions."""

    def __init__(self, module: Any) -> None:
        self.module, self.open = module, False

    def on_start(self, config: Described, path: Path, step: int) -> None:
        self.module.init(project="kenpo", name=path.name, config=json.loads((path / "config.json").read_text()))
        self.open = True

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        self.module.log(scalars(figures), step=step)

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        if step == 0:
            self.on_step(step, figures)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        if self.open:
            self.module.finish()


LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_loggers(names: tuple[str, ...]) -> None:
    """Raises UnknownNameError for a name that is not a logger, InputError for one whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise unknown_name("logger", name, LOGGERS)
        if find_spec(LOGGERS[name]) is None:
            raise InputError(f"--loggers {name}: its package is not installed; run: pip install {LOGGERS[name]}")


def make_loggers(names: tuple[str, ...]) -> list[Callback]:
    """The loggers of these names, not yet started."""
    import importlib

    check_loggers(names)
    return [TensorBoard() if n == "tensorboard" else Tracker(importlib.import_module(n)) for n in dict.fromkeys(names)]
