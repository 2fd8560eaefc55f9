"""Surrogate objectives: how far a ratio may carry the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops import masked, ratios, surrogates
from kenpo.stages.base import Scope, Surrogate
from kenpo.stages.context import Context
from kenpo.stages.ratios import SequenceRatio


def given(ratio: Tensor | None) -> Tensor:
    """The ratio of a surrogate that takes one."""
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
        return surrogates.clip(given(ratio), ctx.advantages, self.low, self.high)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.outside(given(ratio), ctx.advantages, self.low, self.high)


@dataclass(frozen=True)
class Linear(Surrogate):
    """``r·A``: no bound of its own. What bounds the step is in the ratio or the weights."""

    bounds = False

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return given(ratio) * ctx.advantages


@dataclass(frozen=True)
class ScoreFunction(Surrogate):
    """``A·log π``: the policy gradient itself, without a ratio. Source: REINFORCE; RLOO, arXiv:2402.14740."""

    takes_ratio = False
    bounds = False

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
    def span(self) -> Scope:
        return Scope.SEQUENCE if self.pool == "geometric" else Scope.TOKEN

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        r, a = given(ratio), ctx.advantages
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
        return surrogates.detached_clip(given(ratio), ctx.advantages, ctx.logp, self.floor, self.cap)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        r = given(ratio)
        low = r < self.floor if self.floor is not None else r != r
        high = r > self.cap if self.cap is not None else r != r
        return low | high


@dataclass(frozen=True)
class DualClip(Clip):
    """`Clip`, and where A < 0 never below ``dual·A``: a ratio beyond `dual` has no gradient.

    The same cap as TRL's two-sided clip (``delta``). Source: arXiv:1912.09729; verl applies it to everything (3.0).
    """

    dual: float = 3.0

    def check(self) -> None:
        super().check()
        self.refuse(self.dual > 1, f"dual must exceed 1, got {self.dual}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.dual_clip(super().__call__(ratio, ctx), ctx.advantages, self.dual)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return super().clipped(ratio, ctx) | ((ctx.advantages < 0) & (given(ratio) > self.dual))


@dataclass(frozen=True)
class GradientPreservingClip(Surrogate):
    """`Clip` in value; beyond a bound the token keeps the gradient that a ratio at the bound would have.

    Coefficient of ∇log π: (1+high)·A where A > 0 and r > 1+high, (1−low)·A where A < 0 and r < 1−low, else r·A.
    ``dual`` (the authors' recipe: 10; None: off) caps the objective at dual·A where A < 0, without a gradient there.
    Source: GPPO, arXiv:2508.07629.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    def check(self) -> None:
        self.refuse(self.low >= 0 and self.high >= 0, f"low and high are distances ≥ 0, got {self.low}, {self.high}")
        self.refuse(self.dual is None or self.dual > 1, f"dual must exceed 1, got {self.dual}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        value = surrogates.gradient_preserving_clip(given(ratio), ctx.advantages, self.low, self.high)
        return value if self.dual is None else surrogates.dual_clip(value, ctx.advantages, self.dual)

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.outside(given(ratio), ctx.advantages, self.low, self.high)


@dataclass(frozen=True)
class ChiSquareClip(Surrogate):
    """`Clip` with a radius of each token's own, ``√(delta/π_old)``, between the absolute bounds `floor` and `cap`.

    At its bound every token has spent the same chi-square, π_old·(r−1)² = delta: rare tokens get wide bounds.
    Source: RIPO, arXiv:2607.10169.
    """

    delta: float = 0.05
    floor: float = 0.5
    cap: float = 10.0

    _needs = frozenset({"logp_old"})

    def check(self) -> None:
        self.refuse(self.delta >= 0, f"delta must not be negative, got {self.delta}")
        self.refuse(0 <= self.floor <= 1 <= self.cap, f"need floor ≤ 1 ≤ cap, got {self.floor}, {self.cap}")

    def _bounds(self, ctx: Context) -> tuple[Tensor, Tensor]:
        radius = surrogates.chi_square_radius(ctx.read("logp_old").detach(), self.delta)
        return (1 - radius).clamp(min=self.floor), (1 + radius).clamp(max=self.cap)

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.clip_between(given(ratio), ctx.advantages, *self._bounds(ctx))

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        floor, cap = self._bounds(ctx)
        return surrogates.outside(given(ratio), ctx.advantages, 1 - floor, cap - 1)


@dataclass(frozen=True)
class CentredClip(Surrogate):
    """`Clip` around π_old/μ instead of around 1, for a ratio π_θ/μ.

    The band is ``[max(π_old/μ − radius, floor), π_old/μ + radius]``: the first update of a stale batch starts inside,
    wherever the sampler was. With π_old = μ it is `Clip`. A floor above the band's upper end leaves that end alone.
    Source: arXiv:2505.22257.
    """

    radius: float = 0.2
    floor: float = 0.0

    _needs = frozenset({"logp_old", "logp_sampler"})
    ratio_anchor = "sampler"

    def check(self) -> None:
        self.refuse(self.radius >= 0, f"radius must not be negative, got {self.radius}")
        self.refuse(self.floor >= 0, f"floor must not be negative, got {self.floor}")

    def _bounds(self, ctx: Context) -> tuple[Tensor, Tensor]:
        centre = ctx.log_correction().exp()
        cap = centre + self.radius
        return torch.minimum((centre - self.radius).clamp(min=self.floor), cap), cap

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.clip_between(given(ratio), ctx.advantages, *self._bounds(ctx))

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        floor, cap = self._bounds(ctx)
        return surrogates.outside(given(ratio), ctx.advantages, 1 - floor, cap - 1)


@dataclass(frozen=True)
class BranchClip(Surrogate):
    """``min(m·A, m̄·A)``: m mixes the token ratio and the sequence's, m̄ the two clamped, each into its own band.

    m = w·r + (1−w)·s. ``weight`` w: a number, or "entropy": a token's entropy min-max normalised within its response
    (0.5 if flat), detached. ``sequence`` is s; GSPO-token's by default, whose gradient runs through the token itself.
    The mix is clipped, not each branch's minimum taken: an r outside its band still drives the gradient while m·A is
    the smaller. Source: DHPO, arXiv:2601.05607 (our reading: weight, bands and the style of s are not public).
    """

    weight: float | Literal["entropy"] = 0.5
    token_low: float = 0.2
    token_high: float = 0.2
    sequence_low: float = 3e-4
    sequence_high: float = 4e-4
    sequence: SequenceRatio = SequenceRatio(gradient="token")  # noqa: RUF009 - frozen

    def check(self) -> None:
        self.refuse(self.weight == "entropy" or 0 <= self.weight <= 1, f"weight must be in [0, 1], got {self.weight}")
        bands = (self.token_low, self.token_high, self.sequence_low, self.sequence_high)
        self.refuse(min(bands) >= 0, f"bands are distances ≥ 0, got {bands}")

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"entropy"} if self.weight == "entropy" else set())

    def _branches(self, ratio: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor]:
        w = self.mix(ctx)
        bands = (self.token_low, self.token_high), (self.sequence_low, self.sequence_high)
        return surrogates.branch_clip(given(ratio), self.sequence(ctx), ctx.advantages, w, *bands)

    def mix(self, ctx: Context) -> Tensor | float:
        """The token branch's weight: the number, or [B,T]."""
        if self.weight != "entropy":
            return float(self.weight)
        return surrogates.row_normalised(ctx.read("entropy").detach(), ctx.mask)

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return surrogates.smaller(*self._branches(ratio, ctx))

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        free, held = self._branches(ratio, ctx)
        return held.detach() < free.detach()


@dataclass(frozen=True)
class ArctanGate(Surrogate):
    """``f(r)·A`` pooled over the response, ``log f = atan(kappa·log r)/kappa``: bounded by exp(±π/(2·kappa)).

    f(1) = 1 with unit slope, so on policy the gradient is GRPO's; kappa → 0 is GSPO without a clip. Not a paper's
    formula: a gate with the properties reported of SSPO's later versions (arXiv:2602.19327), whose own is not public.
    """

    kappa: float = 1.0

    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.kappa > 0, f"kappa must be positive, got {self.kappa}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        log_gate = (self.kappa * given(ratio).log()).atan() / self.kappa
        return masked.row_mean(log_gate, ctx.mask).exp().unsqueeze(-1) * ctx.advantages


@dataclass(frozen=True)
class ShiftedMean(Surrogate):
    """``(mean_t (shift + min(r·A, clamp(r)·A))^p)^(1/p)``, p = 0 the geometric mean: A inside the mean, made positive.

    The form in which GMPO and PMPO are sometimes written down. It is refused as soon as a trained token has a negative
    advantage, where the log or power is not defined, so it serves A ≥ 0 only: use `SequenceRatio` or `PowerRatio` with
    `Linear`, which take the mean of the ratios and leave A outside.
    """

    shift: float = 1e-6
    p: float = 0.0
    low: float = 0.2
    high: float = 0.2

    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.shift > 0, f"shift must be positive, got {self.shift}")
        self.refuse(0 <= self.p <= 1, f"p must be in [0, 1], got {self.p}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        if bool((ctx.advantages < 0).any()):
            raise InputError(
                "shifted_mean: a negative advantage makes shift + r·A negative, and its log or power is not a number; "
                "take the mean of the ratios and leave A outside: SequenceRatio(bound=LogClip()) with Linear()"
            )
        inner = surrogates.clip(given(ratio), ctx.advantages, self.low, self.high) + self.shift
        return ratios.log_power_mean(inner.log(), self.p, ctx.mask).exp().expand_as(inner)
