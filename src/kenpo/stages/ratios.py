"""Importance ratios: what of π_θ against its anchor carries the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kenpo.ops import ratios
from kenpo.stages.base import Ratio, Scope, Stage
from kenpo.stages.context import Context

Anchor = Literal["old", "sampler", "guided", "prox"]


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """``r_t = π_θ(y_t) / anchor(y_t)``, per token. Log-ratios saturate at ±20. Source: PPO, arXiv:1707.06347."""

    anchor: Anchor = "old"

    def __call__(self, ctx: Context) -> Tensor:
        return ctx.log_ratio(self.anchor).exp()


@dataclass(frozen=True)
class LogClip(Stage):
    """Token log-ratios held on the side the advantage pushes: ≤ `high` where A > 0, ≥ −`low` where A < 0.

    Bounds are distances in log space: 0.4 means ratios in (0.67, 1.49). Source: GMPO, arXiv:2507.20673.
    """

    low: float = 0.4
    high: float = 0.4

    def check(self) -> None:
        self.refuse(self.low >= 0 and self.high >= 0, f"bounds are distances ≥ 0, got {self.low}, {self.high}")

    def bound(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """[B,T] bounded log-ratios; the gradient is 0 where the bound acts."""
        return ratios.bound_outward(log_ratio, advantages, self.low, self.high)

    def acts(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """[B,T] bool: where the bound acts."""
        return ((advantages > 0) & (log_ratio > self.high)) | ((advantages < 0) & (log_ratio < -self.low))


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """``s = exp(mean_t log r_t)``: the geometric mean of a response's token ratios, on each of its tokens.

    ``bound`` holds token log-ratios before they are pooled (GMPO). ``gradient``: "sequence" lets it run through all
    tokens of the response; "token" through each token's own log-prob (GSPO-token: same value, and the same gradient
    while the advantage is constant in the response). An empty row has ratio 1. Source: GSPO, arXiv:2507.18071.
    """

    bound: LogClip | None = None
    anchor: Anchor = "old"
    gradient: Literal["sequence", "token"] = "sequence"

    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        log_ratio = ctx.log_ratio(self.anchor)
        if self.bound is not None:
            log_ratio = self.bound.bound(log_ratio, ctx.advantages)
        s = ratios.sequence_log_mean(log_ratio, ctx.mask).exp().expand_as(log_ratio)
        return ratios.through_own_token(s, ctx.log_ratio(self.anchor)) if self.gradient == "token" else s

    def bounded(self, ctx: Context) -> Tensor | None:
        return None if self.bound is None else self.bound.acts(ctx.log_ratio(self.anchor), ctx.advantages)
