"""One running estimate of success per prompt, kept from batch to batch."""

from __future__ import annotations

import math

from torch import Tensor

from kenpo.ops.masked import row_mean


def beta_start(successes: int, samples: int, rho_min: float = 0.875, smoothed: bool = True) -> tuple[float, float]:
    """(α, β) worth 1/(1 − rho_min) samples, from an offline estimate; without samples (.5, .5).

    `smoothed` adds half a success and half a failure, as the released code does and the paper does not.
    Source: SPO, arXiv:2509.13232.

    >>> [round(x, 6) for x in beta_start(3, 8)]
    [3.111111, 4.888889]
    """
    if samples <= 0:
        return 0.5, 0.5
    worth, s = 1 / (1 - rho_min), 0.5 if smoothed else 0.0
    total = samples + 2 * s
    return worth * (successes + s) / total, worth * (samples - successes + s) / total


def forgetting(drift: float, *, half_life: float, low: float, high: float) -> float:
    """``2^(−drift/half_life)`` held in [low, high]; a NaN drift (a first visit) forgets least: high.

    >>> round(forgetting(0.006, half_life=0.06, low=0.875, high=0.96), 6)
    0.933033
    """
    if math.isnan(drift):
        return high
    return min(max(2.0 ** (-drift / half_life), low), high)


def beta_fold(pair: tuple[float, float], reward: float, rho: float) -> tuple[float, float]:
    """``α ← ρα + r, β ← ρβ + 1 − r``."""
    return rho * pair[0] + reward, rho * pair[1] + 1 - reward


def ema_fold(pair: tuple[float, float], reward: float, rho: float) -> tuple[float, float]:
    """``v ← v + (r − v)/(ρN + 1), N ← ρN + 1`` of (v, N): the same as `beta_fold` for rewards of any size."""
    count = rho * pair[1] + 1
    return pair[0] + (reward - pair[0]) / count, count


def log_prob_drift(then: Tensor, now: Tensor, mask: Tensor) -> Tensor:
    """[B] mean over a response's tokens of |log π_then − log π_now|: how far the policy has moved since.

    NaN on a row without tokens: nothing is known.
    """

    return row_mean((then - now).abs(), mask).masked_fill(~mask.any(-1), math.nan)
