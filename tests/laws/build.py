"""Cases of tests/reference as tensors, and the variations that no result may depend on."""

from __future__ import annotations

import math
import random

import torch

import kenpo
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

KINDS = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


def tensors(case: dict, dtype=torch.float64) -> tuple[kenpo.Rollouts, kenpo.Policy]:
    """A case of nested lists as Rollouts and Policy (floating fields in `dtype`)."""

    def made(fields, specs):
        return {
            n: {k: torch.tensor(x, dtype=dtype) for k, x in v.items()}
            if n == "reward_parts"
            else torch.tensor(v, dtype=dtype if specs[n].kind == "float" else KINDS[specs[n].kind])
            for n, v in fields.items()
        }

    return (
        kenpo.Rollouts(**made(case["rollouts"], ROLLOUT_FIELDS)),
        kenpo.Policy(**made(case["policy"], POLICY_FIELDS)),
    )


def widened(rows, columns: int, junk: float = math.nan):
    """The same batch with more masked columns on the right, filled with junk."""
    changes = {}
    for name, value in rows.tensors().items():
        if value.dim() < 2 or name.startswith("target_"):
            continue
        shape = (value.shape[0], columns, *value.shape[2:])
        if value.dtype == torch.bool:
            more = torch.zeros(shape, dtype=torch.bool)
        else:
            more = torch.full(shape, junk if value.dtype.is_floating_point else 7, dtype=value.dtype)
        changes[name] = torch.cat([value, more], 1)
    if isinstance(rows, kenpo.Policy):
        return kenpo.Policy(**{**rows.tensors(), **changes})
    return kenpo.Rollouts(**{**rows.tensors(), **changes}, reward_parts=rows.reward_parts)


def shuffled(n: int, seed: int) -> torch.Tensor:
    """A permutation of n rows."""
    return torch.tensor(random.Random(seed).sample(range(n), n))


def cut(n: int, size: int) -> list[torch.Tensor]:
    """Rows 0…n-1 in pieces of `size`."""
    return list(torch.arange(n).split(size))


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> bool:
    """Equal up to `tolerance`, relative to the largest entry."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return False
    scale = max(1e-12, float(b.abs().max()) if b.numel() else 0.0)
    return a.numel() == 0 or float((a - b).abs().max()) <= tolerance * scale + 1e-15


def added(into, more):
    """One share's sums and counts added to another's: what a host does with `Loss.sums`."""
    for name, (s, n) in more.items():
        before = into.get(name, (0.0, 0.0))
        into[name] = (before[0] + s, before[1] + n)
    return into
