"""Mixed groups: rollouts that an expert wrote (``rollouts.origin`` 2) beside the policy's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenpo.ops import ratios
from kenpo.stages.base import Ratio, Surrogate
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
