"""Weights that must see a whole group or minibatch: budgets, quantiles and masses over it.

They are exact over the optimizer minibatch, whatever the microbatches, because they run in the two-phase step. Other
codes decide inside each microbatch, so that their result depends on its size; ``approximate="microbatch"`` does as they
do, in one phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kenpo.ops import masked, ratios, surrogates, trust
from kenpo.stages.base import Scope, Stage, Surrogate, Weight
from kenpo.stages.context import Context
from kenpo.stages.ratios import Anchor

Approximate = Literal["none", "microbatch"]


@dataclass(frozen=True)
class _Whole(Stage):
    """A stage over the whole minibatch, or over whatever microbatch it is shown."""

    approximate: Approximate = field(default="none", kw_only=True)

    @property
    def span(self) -> Scope:
        return Scope.BATCH if self.approximate == "none" else Scope.SEQUENCE


@dataclass(frozen=True)
class SecondMoment(_Whole, Weight):
    """Outward tokens are masked, largest (log r)² first, until the mean of (log r)² over the rest is ≤ `budget`.

    r = π_θ/anchor. Outward: A > 0 and r > 1, or A < 0 and r < 1; only such tokens enter the mean or can be masked. Ties
    at the cut are masked together. Source: M2PO, arXiv:2510.01161, algorithm 1.
    """

    budget: float = 0.04
    anchor: Anchor = "sampler"

    _needs = frozenset({"logp"})
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.budget >= 0, f"budget must not be negative, got {self.budget}")

    def __call__(self, ctx: Context) -> Tensor:
        x = ctx.log_ratio(self.anchor).detach()
        return trust.within_moment(x * x, ctx.mask & trust.outward(x, ctx.advantages), self.budget)


@dataclass(frozen=True)
class WeightMoment(_Whole, Weight):
    """Tokens are masked, largest r² first, until the mean of r² over all remaining tokens is ≤ `budget`; r =
    π_θ/anchor.

    On policy the mean is 1, so a useful budget lies above 1. Blind to outward moves with A < 0, where r² shrinks.
    ``outward``: only outward tokens (A > 0 and r > 1, or A < 0 and r < 1) can be masked; the mean is over all the same.
    Our reading of a second statement of M2PO, which bounds E[w²] and not the paper's E[(log w)²].
    """

    budget: float = 1.04
    anchor: Anchor = "sampler"
    outward: bool = False

    _needs = frozenset({"logp"})
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.budget > 0, f"budget must be positive, got {self.budget}")

    def __call__(self, ctx: Context) -> Tensor:
        x = ctx.log_ratio(self.anchor).detach()
        free = trust.outward(x, ctx.advantages) if self.outward else None
        return trust.within_moment((2 * x).exp(), ctx.mask, self.budget, droppable=free)


@dataclass(frozen=True)
class CorrectionMoment(_Whole, Weight):
    """Tokens are masked, largest (log ρ)² first, until the mean over all remaining tokens is < `budget`; ρ = π_old/μ.

    No sign of the advantage is asked, and the smallest one stays whatever the budget. Acts on the sampler mismatch, not
    on the policy's drift. Source: AReaL's ``actor.m2_threshold``.
    """

    budget: float = 0.04
    anchor: Literal["old", "prox"] = "old"

    _needs = frozenset({"logp_sampler"})
    is_correction = True
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.budget > 0, f"budget must be positive, got {self.budget}")

    @property
    def carries_correction(self) -> bool:
        return False  # a mask

    def __call__(self, ctx: Context) -> Tensor:
        x = ctx.log_correction(self.anchor)
        return trust.within_moment(x * x, ctx.mask, self.budget, strict=True, least=True)


@dataclass(frozen=True)
class MomentClip(_Whole, Surrogate):
    """PPO's min-clip with a range found from the batch: M2PO as its released code computes it; no token is masked.

    The (log r)² of the outward tokens are capped at the sorted value τ² before Σ min(v, τ²) reaches budget · n; the
    range is [e^−τ, e^τ]. Within budget nothing is clipped. r = π_θ/anchor.
    Source: github.com/Infini-AI-Lab/M2PO, which finds the range per microbatch.
    """

    budget: float = 0.04
    anchor: Anchor = "sampler"

    _needs = frozenset({"logp"})
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.budget >= 0, f"budget must not be negative, got {self.budget}")

    def _cap(self, ctx: Context) -> Tensor | None:
        """τ², some outward token's own (log r)²; None within budget."""
        x = ctx.log_ratio(self.anchor).detach()
        return trust.capped_moment((x * x)[ctx.mask & trust.outward(x, ctx.advantages)], self.budget)

    def range(self, ctx: Context) -> tuple[float, float]:
        """(low, high) as distances from 1; (1, 99999) within budget."""
        return self._range(self._cap(ctx))

    @staticmethod
    def _range(cap: Tensor | None) -> tuple[float, float]:
        if cap is None:
            return 1.0, 99999.0
        tau = cap.sqrt()
        return float(-(-tau).expm1()), float(tau.expm1())

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        assert ratio is not None, "the algorithm's constructor pairs ratios with surrogates"
        cap = self._cap(ctx)
        low, high = self._range(cap)
        held = ratio.detach().clamp(1 - low, 1 + high)
        return torch.where(self._outside(ratio, ctx, cap), held, ratio) * ctx.advantages

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        assert ratio is not None, "the algorithm's constructor pairs ratios with surrogates"
        return self._outside(ratio, ctx, self._cap(ctx))

    def _outside(self, ratio: Tensor, ctx: Context, cap: Tensor | None) -> Tensor:
        """Told by (log r)², of which τ² is one: the token that stands at the bound keeps its gradient, whatever exp
        rounds to."""
        if cap is None:
            return surrogates.outside(ratio, ctx.advantages, *self._range(None))
        x = ctx.log_ratio(self.anchor).detach()
        return trust.outward(x, ctx.advantages) & (x * x > cap)


@dataclass(frozen=True)
class SpuriousTokens(Weight):
    """Rare and confident tokens of good responses get `weight` (0: silenced), all others 1.

    Spurious: A > 0, π_θ(y) < `probability` and entropy strictly below the `quantile` (linear interpolation) of the
    entropies of such candidates in the minibatch (``scope="conditional"``) or of all its tokens ("batch"; the quantile
    is then 0.8 in the source). π_θ and entropy are the current policy's, detached. No candidate: nothing is spurious.
    A `weight` above 0 is the soft variant (ours; pair it with ``over="weight"``). ``criteria="probability"``: every
    token with π_θ(y) < `probability`, whatever entropy and A (worse in the paper's ablation).
    Source: STAPO, arXiv:2602.15620.
    """

    probability: float = 0.002
    quantile: float = 0.75
    scope: Literal["conditional", "batch"] = "conditional"
    weight: float = 0.0
    criteria: Literal["all", "probability"] = "all"

    _scope = Scope.BATCH

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp"} if self.criteria == "probability" else {"logp", "entropy"})

    @property
    def span(self) -> Scope:
        return Scope.TOKEN if self.criteria == "probability" else Scope.BATCH

    def check(self) -> None:
        self.refuse(0 < self.probability <= 1, f"probability must lie in (0, 1], got {self.probability}")
        self.refuse(0 <= self.quantile <= 1, f"quantile must lie in [0, 1], got {self.quantile}")
        self.refuse(0 <= self.weight <= 1, f"weight must lie in [0, 1], got {self.weight}")

    def __call__(self, ctx: Context) -> Tensor:
        logp = ctx.logp.detach()
        if self.criteria == "probability":
            found = ctx.mask & (logp.exp() < self.probability)
        else:
            found = trust.spurious(
                logp, ctx.read("entropy").detach(), ctx.advantages, ctx.mask, self.probability, self.quantile,
                self.scope == "conditional",
            )  # fmt: skip
        return torch.where(found, logp.new_tensor(self.weight), logp.new_ones(()))


@dataclass(frozen=True)
class Surprisal(_Whole, Weight):
    """While the batch's mean entropy is below target: `boost` on the most surprising tokens with A > 0, and `damp`
    (if given) on the most surprising with A < 0; 1 elsewhere and otherwise.

    The most surprising are the top ⌈fraction · n⌉ (at least one; ties belong to them) by −log π_θ, detached, among the
    n tokens of that sign in the minibatch. The paper's adaptive rule for (boost, damp) is
    `kenpo.ops.trust.adapted_boost`, for a loop to call between batches. Source: STARE, arXiv:2606.19236; its code
    selects inside each microbatch.
    """

    fraction: float = 0.1
    boost: float = 1.1
    damp: float | None = None
    target_entropy: float = 0.3

    _needs = frozenset({"logp", "entropy"})

    def check(self) -> None:
        self.refuse(0 < self.fraction <= 1, f"fraction must lie in (0, 1], got {self.fraction}")
        self.refuse(self.boost >= 0 and (self.damp or 0) >= 0, f"weights must be ≥ 0, got {self.boost}, {self.damp}")

    def __call__(self, ctx: Context) -> Tensor:
        a, surprise = ctx.advantages, -ctx.logp.detach()
        w = torch.ones_like(surprise)
        if not bool(masked.mean(ctx.read("entropy").detach(), ctx.mask) < self.target_entropy):
            return w
        w[trust.top_fraction(surprise, ctx.mask & (a > 0), self.fraction)] = self.boost
        if self.damp is not None:
            w[trust.top_fraction(surprise, ctx.mask & (a < 0), self.fraction)] = self.damp
        return w


@dataclass(frozen=True)
class GroupMass(Weight):
    """``r_i · min(1, cap / Σ_group r)``: trajectory ratios r_i = Π_t π_θ/anchor, scaled down together where the group's
    sum exceeds `cap`, so that relative weights stay. Detached; on every token of the response.

    `cap` must be given (the source has no default). log r_i saturates at ±20. The weight is the importance ratio
    itself: use it with `ScoreFunction`. Source: GMC-GRPO, arXiv:2610.01896.
    """

    cap: float
    anchor: Anchor = "old"

    _needs = frozenset({"logp"})
    _scope = Scope.GROUP
    is_ratio = True

    @property
    def distance(self) -> None:
        """None: a group whose ratios are all 1 may exceed the cap."""
        return None

    def check(self) -> None:
        self.refuse(self.cap > 0, f"cap must be positive, got {self.cap}")

    def __call__(self, ctx: Context) -> Tensor:
        r = ratios.sequence_log_sum(ctx.log_ratio(self.anchor).detach(), ctx.mask).squeeze(-1).exp()
        return ctx.per_token(trust.capped_mass(r, ctx.group, ctx.selected, self.cap))
