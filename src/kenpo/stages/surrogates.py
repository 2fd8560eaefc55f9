"""Surrogate objectives: how far a ratio may carry the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kenpo.ops import masked, surrogates
from kenpo.stages.base import Scope, Surrogate
from kenpo.stages.context import Context


def _given(ratio: Tensor | None) -> Tensor:
    assert ratio is not None, "the algorithm's constructor pairs ratios with surrogates"
    return ratio


@dataclass(frozen=True)
class Clip(Surrogate):
    """``min(r·A, clamp(r, 1−low, 1+high)·A)``. ``low`` and ``high`` are distances from 1.

    Source: PPO, arXiv:1707.06347; two widths ("clip-higher"): DAPO, arXiv:2503.14476.
    """

    low: float = 0.2
    high: float = 0.2

    def check(self) -> None:
        self.refuse(self.low >= 0 and self.high >= 0, f"low and high are distances ≥ 0, got {self.low}, {self.high}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.clip(_given(ratio), ctx.advantages, self.low, self.high)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.outside(_given(ratio), ctx.advantages, self.low, self.high)


@dataclass(frozen=True)
class Linear(Surrogate):
    """``r·A``: no bound of its own. What bounds the step is in the ratio or the weights."""

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return _given(ratio) * ctx.advantages


@dataclass(frozen=True)
class ScoreFunction(Surrogate):
    """``A·log π``: the policy gradient itself, without a ratio. Source: REINFORCE; RLOO, arXiv:2402.14740."""

    takes_ratio = False

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return ctx.advantages * ctx.logp


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """``f(r)·A`` with ``f(r) = (4/τ)·σ(τ(r−1))``, τ = ``tau_pos`` where A > 0, else ``tau_neg``.

    f has unit slope at r = 1, so on policy the gradient is GRPO's whatever τ. The value there is 2/τ, not 1.
    ``pool="geometric"``: the geometric mean of f over the response stands on each of its tokens (SSPO,
    arXiv:2602.19327, v1).
    Source: SAPO, arXiv:2511.20347.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    pool: Literal["token", "geometric"] = "token"

    def check(self) -> None:
        self.refuse(self.tau_pos > 0 and self.tau_neg > 0, f"τ must be positive, got {self.tau_pos}, {self.tau_neg}")

    @property
    def scope(self) -> Scope:
        return Scope.SEQUENCE if self.pool == "geometric" else Scope.TOKEN

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        r, a = _given(ratio), ctx.advantages
        if self.pool == "token":
            return surrogates.soft_gate(r, a, self.tau_pos, self.tau_neg) * a
        log_gate = surrogates.log_soft_gate(r, a, self.tau_pos, self.tau_neg)
        return masked.row_mean(log_gate, ctx.mask).exp().unsqueeze(-1) * a


@dataclass(frozen=True)
class DetachedClip(Surrogate):
    """``sg[clamp(r, floor, cap)]·A·log π``: the ratio is a bounded constant, every token keeps a gradient.

    ``floor`` and ``cap`` are absolute bounds on the ratio (None: open), not distances from 1. The value depends on
    absolute log-probs and is no measure of progress. Source: CISPO, arXiv:2506.13585 (the paper gives no number for the
    cap; 5 is ours, from the range that ScaleRL, arXiv:2510.13786, found insensitive).
    """

    floor: float | None = None
    cap: float | None = 5.0

    def check(self) -> None:
        low, high = self.floor, self.cap
        self.refuse(low is None or low >= 0, f"floor must not be negative, got {low}")
        self.refuse(high is None or high > (low or 0), f"cap must exceed the floor, got floor {low}, cap {high}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.detached_clip(_given(ratio), ctx.advantages, ctx.logp, self.floor, self.cap)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        r = _given(ratio)
        low = r < self.floor if self.floor is not None else r != r
        high = r > self.cap if self.cap is not None else r != r
        return low | high
