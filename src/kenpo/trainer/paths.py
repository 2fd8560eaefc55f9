"""Paths of a configuration, made whole: `~` is the user's folder; what is recorded opens from any working folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kenpo.experience.shards import is_path
from kenpo.experience.tasks import BUILT_IN
from kenpo.learner.critic import named
from kenpo.trainer.config import TrainConfig


def whole_paths(config: TrainConfig) -> TrainConfig:
    """`config` with every path absolute. Names of tasks, algorithms, verifiers and hub models stay as they are."""
    changes = {
        "task": _each(_data, config.task),
        "eval_file": _each(_data, config.eval_file),
        "corpus": None if config.corpus is None else _absolute(config.corpus),
        "expert": None if config.expert is None else _absolute(config.expert),
        "model": _model(config.model),
        "partner": None if config.partner is None else _model(config.partner),
        "teacher": config.teacher if config.teacher in (None, "base", "hint") else _model(config.teacher),
        "critic": _model(config.critic) if config.critic and named(config.critic) else config.critic,
        "template": config.template if config.template in ("auto", "none") else _absolute(config.template),
        "algorithm": _code(config.algorithm),
        "engine": _code(config.engine),
        "verifier": _each(_code, config.verifier),
        "out": None if config.out is None else str(Path(config.out).expanduser()),
        "series": None if config.series is None else str(Path(config.series).expanduser()),
    }
    return config.but(**{name: value for name, value in changes.items() if value != getattr(config, name)})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _data(task: str) -> str:
    """A data file's path; a task's name is none."""
    return _absolute(task) if is_path(str(Path(task).expanduser())) and task not in BUILT_IN else task


def _model(name: str) -> str:
    """A model folder's path; ``bundled`` and a hub's names are none."""
    return _absolute(name) if name != "bundled" and Path(name).expanduser().is_dir() else name


def _code(spec: str) -> str:
    """FILE.py:NAME with the file's whole path, and what stands behind it (=WEIGHT); model:FOLDER likewise."""
    if spec.startswith("model:"):
        return "model:" + _absolute(spec.removeprefix("model:"))
    file, colon, name = spec.partition(".py:")
    return _absolute(file + ".py") + ":" + name if colon else spec


def _each(whole: Callable[[str], str], given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """One, several or none."""
    return given if given is None else whole(given) if isinstance(given, str) else tuple(map(whole, given))
