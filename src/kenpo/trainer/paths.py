"""Paths of a configuration, made whole: `~` is the user's folder; what is recorded opens from any working folder."""

from __future__ import annotations

from pathlib import Path

from kenpo.experience.rows import READERS
from kenpo.trainer.config import TrainConfig


def whole_paths(config: TrainConfig) -> TrainConfig:
    """`config` with every path absolute. Names of tasks, algorithms, verifiers and hub models stay as they are."""
    changes = {
        "task": _data(config.task),
        "eval_file": None if config.eval_file is None else _absolute(config.eval_file),
        "expert": None if config.expert is None else _absolute(config.expert),
        "model": _model(config.model),
        "teacher": config.teacher if config.teacher in (None, "base", "hint") else _model(config.teacher),
        "critic": config.critic if config.critic in (None, "trunk") else _model(config.critic),
        "algorithm": _code(config.algorithm),
        "engine": _code(config.engine),
        "verifier": _verifiers(config.verifier),
        "out": None if config.out is None else str(Path(config.out).expanduser()),
        "series": None if config.series is None else str(Path(config.series).expanduser()),
    }
    return config.but(**{name: value for name, value in changes.items() if value != getattr(config, name)})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _data(task: str) -> str:
    """A data file's path; a task's name is none."""
    return _absolute(task) if task.endswith(tuple(READERS)) else task


def _model(name: str) -> str:
    """A model folder's path; ``bundled`` and a hub's names are none."""
    return _absolute(name) if name != "bundled" and Path(name).expanduser().is_dir() else name


def _code(spec: str) -> str:
    """FILE.py:NAME with the file's whole path, and what stands behind it (=WEIGHT)."""
    file, colon, name = spec.partition(".py:")
    return _absolute(file + ".py") + ":" + name if colon else spec


def _verifiers(given: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if given is None or isinstance(given, str):
        return given if given is None else _code(given)
    return tuple(map(_code, given))
