"""Mixed groups: rollouts that an expert wrote (``rollouts.origin`` 2) beside the policy's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kenpo.ops import groups, masked, ratios
from kenpo.stages.advantages import GroupZScore
from kenpo.stages.aggregates import TokenMean
from kenpo.stages.base import Aggregate, Ratio, Regularizer, Scope, Surrogate, Weight
from kenpo.stages.context import Context
from kenpo.stages.ratios import TokenRatio
from kenpo.stages.surrogates import Clip, given
from kenpo.types import EXPERT


def by_expert(ctx: Context) -> Tensor:
    """[B,1] bool: the rollout is an expert's."""
    return (ctx.read("origin") == EXPERT).unsqueeze(-1)


@dataclass(frozen=True)
class ShapedProbability(Ratio):
    """``p/(p + gamma)``, p = π_θ(y_t): an expert's token, its behaviour probability set to 1 and shaped.

    Coefficient of ∇log π: gamma·p/(p + gamma)², largest (¼) at p = gamma: unlikely tokens are not drowned by likely
    ones, nor hammered. Source: LUFFY, arXiv:2504.14945 (gamma 0.1).
    """

    gamma: float = 0.1

    _needs = frozenset({"logp"})

    def check(self) -> None:
        self.refuse(self.gamma > 0, f"gamma must be positive, got {self.gamma}")

    def __call__(self, ctx: Context) -> Tensor:
        p = ctx.logp.clamp(max=ratios.LIMIT).exp()
        return p / (p + self.gamma)


@dataclass(frozen=True)
class ExpertRatio(Ratio):
    """``p/(μ + offset)`` with the expert's own recorded probability μ (``logp_sampler`` of its rows), unshaped.

    Source: LUFFY's code, arXiv:2504.14945, where the behaviour probabilities are given.
    """

    offset: float = 1e-6

    _needs = frozenset({"logp", "logp_sampler"})

    def check(self) -> None:
        self.refuse(self.offset > 0, f"offset must be positive, got {self.offset}")

    def __call__(self, ctx: Context) -> Tensor:
        p, mu = (x.clamp(max=ratios.LIMIT).exp() for x in (ctx.logp, ctx.read("logp_sampler")))
        return p / (mu + self.offset)


@dataclass(frozen=True)
class ByOrigin(Ratio):
    """`expert` on the rollouts an expert wrote, `own` on all others. Source: LUFFY, arXiv:2504.14945."""

    own: TokenRatio = TokenRatio()  # noqa: RUF009 - frozen
    expert: ShapedProbability | ExpertRatio = ShapedProbability()

    _needs = frozenset({"origin"})

    def __call__(self, ctx: Context) -> Tensor:
        return torch.where(by_expert(ctx), self.expert(ctx), self.own(ctx))


@dataclass(frozen=True)
class GoldenAnswer(Surrogate):
    """`own` on the policy's rollouts; ``A·log π`` on an expert's: neither ratio nor clip, the same pull at any p.

    ``floor``: least advantage of an expert's rollout (0 keeps one that scored below its group from being unlearnt,
    which has no bound; None, as published: off). Source: Golden-GRPO (GRIN), arXiv:2608.25243.
    """

    own: Clip = Clip()  # noqa: RUF009 - frozen
    floor: float | None = None

    _needs = frozenset({"origin", "logp"})

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        a = ctx.advantages if self.floor is None else ctx.advantages.clamp(min=self.floor)
        return torch.where(by_expert(ctx), a * ctx.logp, self.own(ratio, ctx))

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return self.own.clipped(given(ratio), ctx) & ~by_expert(ctx)


@dataclass(frozen=True)
class OffContext(Weight):
    """``clamp((π_old/π_guided)^power, floor, cap)``: how likely the response was without the hint that sampled it.

    π_guided is the old policy under the privileged prompt (``rollouts.logp_guided``), π_old the same under the plain
    one. ``level="sequence"``: from the response's mean log-ratio, on all its tokens. On an unguided row ``logp_guided``
    is ``logp_old``: weight 1. Constant; log-ratios saturate at ±20. Source: Off-Context GRPO, arXiv:2607.19313.
    """

    power: float = 1.0
    floor: float = 0.01
    cap: float = 1.0
    level: Literal["token", "sequence"] = "token"

    _needs = frozenset({"logp_old", "logp_guided"})
    is_correction = True

    def check(self) -> None:
        self.refuse(self.power > 0, f"power must be positive, got {self.power}")
        self.refuse(
            0 <= self.floor <= 1 <= self.cap, f"floor and cap stand on either side of 1, got {self.floor}, {self.cap}"
        )

    @property
    def span(self) -> Scope:
        return Scope.SEQUENCE if self.level == "sequence" else Scope.TOKEN

    def __call__(self, ctx: Context) -> Tensor:
        d = ratios.log_ratio(ctx.read("logp_old"), ctx.read("logp_guided"), ctx.mask).detach()
        if self.level == "sequence":
            d = ctx.per_token(masked.row_mean(d, ctx.mask))
        return (self.power * d).exp().clamp(self.floor, self.cap)


@dataclass(frozen=True)
class OwnZScore(GroupZScore):
    """`GroupZScore` among the group's rollouts that no expert wrote; 0 on an expert's.

    Source: the "split" estimator of LUFFY's code, arXiv:2504.14945.
    """

    _needs = frozenset({"origin"})

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        own = ctx.selected & ~by_expert(ctx).squeeze(-1)
        return ctx.per_token(groups.zscore(rewards, ctx.group, own, eps=self.eps, ddof=self.ddof)), state

    def check(self) -> None:
        super().check()
        self.refuse(not self.inside, "inside is not offered among own rollouts; leave it false")


@dataclass(frozen=True)
class OwnRows(Weight):
    """0 on a rollout that an expert wrote, 1 elsewhere; with ``over="kept"`` it leaves the denominator too."""

    _needs = frozenset({"origin"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        return ~by_expert(ctx) & ctx.mask


@dataclass(frozen=True)
class ExpertNLL(Regularizer):
    """``−coef · log π`` on rows that an expert wrote (``origin`` 2), over their own tokens.

    The mean over those tokens of the whole minibatch; 0 without such rows. The plain mixture with supervised training.
    """

    coef: float = 1.0

    _needs = frozenset({"logp", "origin"})

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    def __call__(self, ctx: Context) -> Tensor:
        return -self.coef * ctx.logp

    def rows(self, ctx: Context) -> Tensor | None:
        return ctx.mask & by_expert(ctx)

    @property
    def own_aggregate(self) -> Aggregate | None:
        return TokenMean()
