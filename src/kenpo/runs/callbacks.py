"""What a run tells its onlookers, and the onlookers that turn it into files of other programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
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
    def task(self) -> str | tuple[str, ...]:
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


class Dispensable(Callback):
    """An onlooker that must not take the run down: one that fails is left out from then on, with a note.

    `say` is given that note. KeyboardInterrupt and the like pass.
    """

    def __init__(self, name: str, inner: Callback, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.inner: Callback | None = inner

    def _tell(self, what: str, *args: Any) -> None:
        if self.inner is None:
            return
        try:
            getattr(self.inner, what)(*args)
        except Exception as error:
            self.inner = None
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.say(f"the logger {self.name} failed ({reason}) and is left out; the run goes on and writes its files")

    def on_start(self, config: Described, path: Path, step: int) -> None:
        self._tell("on_start", config, path, step)

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        self._tell("on_step", step, figures)

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        self._tell("on_eval", step, figures)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._tell("on_checkpoint", step, path)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        self._tell("on_end", summary)


LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_loggers(names: tuple[str, ...]) -> None:
    """Raises UnknownNameError for a name that is not a logger, InputError for one whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise unknown_name("logger", name, LOGGERS)
        if find_spec(LOGGERS[name]) is None:
            raise InputError(f"--loggers {name}: its package is not installed; run: pip install {LOGGERS[name]}")


def make_loggers(names: tuple[str, ...], say: Callable[[str], None] = warnings.warn) -> list[Callback]:
    """The loggers of these names, not yet started. `say` hears of one that fails later on and is left out."""
    check_loggers(names)
    return [Dispensable(n, _logger(n), say) for n in dict.fromkeys(names)]


def _logger(name: str) -> Callback:
    import importlib

    return TensorBoard() if name == "tensorboard" else Tracker(importlib.import_module(name))
