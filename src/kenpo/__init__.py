"""Kenpo: LLM policy optimization as an exact algebra. The public names on one screen; imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenpo import errors, ops, schedules, stages
    from kenpo.algorithm import Algorithm
    from kenpo.algorithms import get, names
    from kenpo.conditions import acts, biased, uncorrected
    from kenpo.hosts import feeds, given
    from kenpo.loading import load, resolve
    from kenpo.order import coefficients, evaluate, objective, prepare, select, weigh
    from kenpo.stages.base import Scope
    from kenpo.trainer.config import TrainConfig
    from kenpo.trainer.loop import train
    from kenpo.types import Batch, Loss, Policy, Prepared, Result, Rollouts, Totals

_WHERE = {
    "kenpo.algorithm": ("Algorithm",),
    "kenpo.algorithms": ("get", "names"),
    "kenpo.conditions": ("acts", "biased", "uncorrected"),
    "kenpo.hosts": ("feeds", "given"),
    "kenpo.loading": ("load", "resolve"),
    "kenpo.order": ("coefficients", "evaluate", "objective", "prepare", "select", "weigh"),
    "kenpo.stages.base": ("Scope",),
    "kenpo.trainer.config": ("TrainConfig",),
    "kenpo.trainer.loop": ("train",),
    "kenpo.types": ("Batch", "Loss", "Policy", "Prepared", "Result", "Rollouts", "Totals"),
}
_MODULE_OF = {name: module for module, public in _WHERE.items() for name in public}
_SUBMODULES = ("errors", "ops", "schedules", "stages")

__all__ = [
    "Algorithm", "Batch", "Loss", "Policy", "Prepared", "Result", "Rollouts", "Scope", "Totals", "TrainConfig",
    "acts", "biased", "coefficients", "errors", "evaluate", "feeds", "get", "given", "load", "names", "objective",
    "ops", "prepare", "resolve", "schedules", "select", "stages", "train", "uncorrected",
    "weigh",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"kenpo.{name}")
    raise AttributeError(f"module 'kenpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
