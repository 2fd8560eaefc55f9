"""Rollouts that can't move the parameters: their terms are measured, no backward pass runs for them.

A token whose advantage or weight is 0 has the coefficient 0, whatever the policy says of it. A group whose outcomes are
all alike, common once a model is good at its task or still bad at it, therefore costs a forward pass and no more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kenpo.algorithm import Algorithm
from kenpo.ops.groups import group_sum
from kenpo.stages.base import snake
from kenpo.types import Batch


def why_none_is_idle(algorithm: Any) -> str | None:
    """Why a rollout without advantage may still have a gradient, or None: it has none."""
    if getattr(type(algorithm), "objective", None) is not Algorithm.objective:
        return f"{type(algorithm).__name__} has an objective of its own"
    if algorithm.regularizers:
        return f"{' and '.join(map(snake, algorithm.regularizers))} moves rollouts without advantage too"
    return None


def idle_rows(algorithm: Any, batch: Batch) -> Tensor:
    """[B] bool: selected rollouts of a one-phase batch in whose group no token's coefficient can differ from 0.

    Whole groups, since a rollout that leaves the others of its group would run their prompt again.
    """
    selected = batch.prepared.selected
    if why_none_is_idle(algorithm) is not None:
        return selected & False
    gain = batch.advantages if batch.weights is None else batch.advantages * batch.weights
    moving = (gain != 0).any(1) & selected
    return selected & (group_sum(moving.to(gain.dtype), batch.prepared.rollouts.group, selected) == 0)
