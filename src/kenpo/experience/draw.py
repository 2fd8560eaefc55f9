"""Drawing problems by weight, without repetition, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kenpo.errors import InputError


def draw_prioritised(ids: Sequence[int], weights: Mapping[int, float], seed: int) -> list[int]:
    """All ids with a weight above 0 in a random order: at each place an id is drawn from those left, by its weight.

    An id without a weight gets the mean of the weights given (our reading: what was never tried is neither sought nor
    shunned). The order is that of log(u)/w, u uniform (Efraimidis and Spirakis 2006). InputError for a negative or
    non-finite weight, or if none is above 0.
    """
    for id_, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"priority of problem {id_}: {weight} is not a finite number of 0 or more")
    usual = math.fsum(weights.values()) / len(weights) if weights else 1.0
    w = torch.tensor([weights.get(i, usual) for i in ids], dtype=torch.float64)
    if not bool((w > 0).any()):
        raise InputError("priorities: every problem has weight 0, so none can be drawn")
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(len(ids), dtype=torch.float64, generator=generator).clamp_min(1e-300)
    order = torch.where(w > 0, u.log() / w, -torch.inf).argsort(descending=True, stable=True)
    return [ids[int(i)] for i in order[: int((w > 0).sum())]]
