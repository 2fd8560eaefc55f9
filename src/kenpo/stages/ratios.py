"""Importance ratios: what of π_θ against its anchor carries the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.ops import ratios
from kenpo.stages.base import Ratio, Scope, Stage
from kenpo.stages.context import Context
from kenpo.stages.routing import RouterShift

Anchor = Literal["old", "sampler", "guided", "prox"]


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """``r_t = π_θ(y_t) / anchor(y_t)``, per token. Log-ratios saturate at ±20. Source: PPO, arXiv:1707.06347.

    ``shift`` multiplies each ratio by a detached router-drift factor before the surrogate clips it; behind the clip
    such a factor is a weight (`RouterStability`), so ``placement="post_clip"`` is refused here.
    """

    anchor: Anchor = "old"
    shift: RouterShift | None = None

    def check(self) -> None:
        self.refuse(
            self.shift is None or self.shift.placement == "pre_clip",
            "a shift behind the clip multiplies the objective: use weights=(RouterStability(),), or pre_clip here",
        )

    def __call__(self, ctx: Context) -> Tensor:
        log_ratio = ctx.log_ratio(self.anchor)
        return (log_ratio if self.shift is None else log_ratio + self.shift.log_factor(ctx)).exp()


@dataclass(frozen=True)
class LogClip(Stage):
    """Token log-ratios held on the side the advantage pushes: ≤ `high` where A > 0, ≥ −`low` where A < 0.

    Bounds are distances in log space: 0.4 means ratios in (0.67, 1.49). ``low`` None mirrors `high`: the formula as
    printed, in which the lower bound has no effect and the floor is the reciprocal of the upper one; the codes of the
    authors, verl and TRL use the lower bound. Source: GMPO, arXiv:2507.20673.
    """

    low: float | None = 0.4
    high: float = 0.4

    def check(self) -> None:
        good = self.high >= 0 and (self.low is None or self.low >= 0)
        self.refuse(good, f"bounds are distances ≥ 0, got {self.low}, {self.high}")

    @property
    def floor(self) -> float:
        """The distance below 0 at which log-ratios are held where A < 0."""
        return self.high if self.low is None else self.low

    def bound(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """[B,T] bounded log-ratios; the gradient is 0 where the bound acts."""
        return ratios.bound_outward(log_ratio, advantages, self.floor, self.high)

    def acts(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """[B,T] bool: where the bound acts."""
        return ((advantages > 0) & (log_ratio > self.high)) | ((advantages < 0) & (log_ratio < -self.floor))


def _bounded(ratio: SequenceRatio | PowerRatio, ctx: Context) -> Tensor:
    log_ratio = ctx.log_ratio(ratio.anchor)
    return log_ratio if ratio.bound is None else ratio.bound.bound(log_ratio, ctx.advantages)


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """``s = exp(mean_t log r_t)``: the geometric mean of a response's token ratios, on each of its tokens.

    ``bound`` holds token log-ratios before they are pooled (GMPO). ``shift`` adds a detached log-factor for the drift
    of a mixture of experts' routers, after the bound or before it (RSPO). ``gradient``: "sequence" lets it run through
    all tokens of the response; "token" through each token's own log-prob (GSPO-token: same value, and the same
    gradient while the advantage is constant in the response). ``pool="product"``: the product of the ratios, without
    the length normalisation, saturated. An empty row has ratio 1. Source: GSPO, arXiv:2507.18071.
    """

    bound: LogClip | None = None
    anchor: Anchor = "old"
    gradient: Literal["sequence", "token"] = "sequence"
    pool: Literal["geometric", "product"] = "geometric"
    shift: RouterShift | None = None

    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        log_ratio = self._token_terms(ctx)
        pooled = ratios.sequence_log_mean if self.pool == "geometric" else ratios.sequence_log_sum
        s = pooled(log_ratio, ctx.mask).exp().expand_as(log_ratio)
        return ratios.through_own_token(s, log_ratio) if self.gradient == "token" else s

    def _token_terms(self, ctx: Context) -> Tensor:
        if self.shift is None:
            return _bounded(self, ctx)
        drift = self.shift.log_factor(ctx)
        if self.shift.placement == "post_clip":
            return _bounded(self, ctx) + drift
        log_ratio = ctx.log_ratio(self.anchor) + drift
        return log_ratio if self.bound is None else self.bound.bound(log_ratio, ctx.advantages)

    def bounded(self, ctx: Context) -> Tensor | None:
        return None if self.bound is None else self.bound.acts(ctx.log_ratio(self.anchor), ctx.advantages)


@dataclass(frozen=True)
class PowerRatio(Ratio):
    """``(mean_t r_t^p)^(1/p)``: a power mean of a response's token ratios, on each of its tokens.

    ``p`` a number in [0, 1]: 1 is the arithmetic mean, 0 the geometric one. ``p="ess"``: each response's own, detached,
    such that the effective number of tokens sharing the gradient is (1−f)·ESS(1) + f·n, f its share of bounded tokens;
    1 if all its ratios are equal. ``bound`` acts before the mean. An empty row has ratio 1.
    Source: PMPO, arXiv:2601.22521; the map from f to the target is our reading, the paper's is not public.
    """

    p: float | Literal["ess"] = "ess"
    bound: LogClip | None = LogClip()
    anchor: Anchor = "old"

    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.p == "ess" or 0 <= self.p <= 1, f"p must be in [0, 1] or 'ess', got {self.p}")
        self.refuse(
            self.p != "ess" or self.bound is not None,
            "without a bound no token is clipped and p would always be 1; give p a number",
        )

    def __call__(self, ctx: Context) -> Tensor:
        log_ratio = _bounded(self, ctx)
        return ratios.log_power_mean(log_ratio, self._exponent(ctx, log_ratio), ctx.mask).exp().expand_as(log_ratio)

    def exponent(self, ctx: Context) -> Tensor | float:
        """[B,1] each response's p, or the fixed number."""
        return self._exponent(ctx, _bounded(self, ctx))

    @torch.no_grad()
    def _exponent(self, ctx: Context, log_ratio: Tensor) -> Tensor | float:
        if self.p != "ess":
            return float(self.p)
        assert self.bound is not None
        held = self.bound.acts(ctx.log_ratio(self.anchor), ctx.advantages)
        return ratios.ess_exponent(log_ratio, held, ctx.mask)

    def bounded(self, ctx: Context) -> Tensor | None:
        return None if self.bound is None else self.bound.acts(ctx.log_ratio(self.anchor), ctx.advantages)


@dataclass(frozen=True)
class PrefixMinRatio(Ratio):
    """``w_t = u_t · r_t``, u_t the smallest ratio among the response's *earlier* tokens (1 for its first), detached.

    ``cap_prefix_at_one`` holds u_t ≤ 1 (off: as published, u_t > 1 amplifies where every earlier ratio exceeds 1).
    ``form="inclusive"``: w_t is the smallest ratio up to t, in place of the product; its gradient runs through the
    token's own log-prob. Masked tokens between are skipped. Source: MinPRO, arXiv:2601.22718.
    """

    form: Literal["strict", "inclusive"] = "strict"
    cap_prefix_at_one: bool = False
    anchor: Anchor = "sampler"

    _scope = Scope.SEQUENCE
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(
            not (self.cap_prefix_at_one and self.form == "inclusive"),
            "the inclusive form has no prefix factor to cap; set cap_prefix_at_one to false",
        )

    def __call__(self, ctx: Context) -> Tensor:
        log_ratio = ctx.log_ratio(self.anchor)
        prefix = ratios.log_prefix_min(log_ratio, ctx.mask, strict=self.form == "strict")
        if self.form == "inclusive":
            return ratios.through_own_token(prefix.exp(), log_ratio)
        return ((prefix.clamp(max=0) if self.cap_prefix_at_one else prefix) + log_ratio).exp()
