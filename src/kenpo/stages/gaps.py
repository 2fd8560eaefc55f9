"""Advantages from a teacher's log-probs of the sampled tokens: g_t = log q(y_t) − log p(y_t), a constant.

With a score function, E[g·∇log p] is minus the gradient of KL(p‖q) at the prefix. A function of the prefix alone, such
as the whole divergence, would train nothing in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kenpo.fields import ANCHORS
from kenpo.ops import groups, ratios, teachers
from kenpo.stages.advantages import GroupZScore
from kenpo.stages.base import Advantage, Scope
from kenpo.stages.context import Context

Named = Literal["old", "sampler", "current"]


def teacher_gap(ctx: Context, anchor: str) -> Tensor:
    """[B,T] log q − log p of the sampled tokens, saturated; p is π_old, μ or the policy itself; a constant."""
    mine = ctx.logp if anchor == "current" else ctx.read(ANCHORS[anchor])
    return ratios.log_ratio(ctx.read("logp_teacher"), mine.detach(), ctx.mask)


@dataclass(frozen=True)
class _Gap(Advantage):
    anchor: Named = "old"

    _scope = Scope.TOKEN

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"logp_teacher"} | ({"logp"} if self.anchor == "current" else set())

    def gap(self, ctx: Context) -> Tensor:
        """[B,T] `teacher_gap`, 0 on rows without a hint."""
        return teacher_gap(ctx, self.anchor) * ctx.hinted.unsqueeze(-1)


@dataclass(frozen=True)
class TeacherGap(_Gap):
    """``coef · (log q − log p)`` of the sampled token; the policy gradient of −coef·KL(p‖q) at each prefix.

    ``anchor``: whose log p, "old" π_old, "sampler" μ, or "current" π_θ (then two phases). ``discount`` > 0 puts the
    discounted sum from the token on in its place (1: the sequence's KL). 0 on rows that ``rollouts.hinted``
    leaves out. Exactly 0 where the teacher equals that policy. g saturates at ±20. Source: on-policy distillation
    (Thinking Machines, 2025), whose implementations differ in the anchor; the blog saw no gain from a discount.
    """

    coef: float = 1.0
    discount: float = 0.0

    @property
    def span(self) -> Scope:
        return Scope.SEQUENCE if self.discount else Scope.TOKEN

    def check(self) -> None:
        self.refuse(0 <= self.discount <= 1, f"discount must lie in [0, 1], got {self.discount}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        g = self.coef * self.gap(ctx)
        return (teachers.later_sum(g, ctx.mask, self.discount) if self.discount else g), state


@dataclass(frozen=True)
class FutureGap(_Gap):
    """The mean of g over a token's *later* tokens (0 for the last): what the choice of a token leads into.

    ``normalise=False``: their sum. ``inclusive``: this token's too, discounted by ``gamma`` and over the tokens from
    here on; ``whiten``: over all trainable tokens of the batch, (x − mean)/√(var + 1e-8), ddof 1. ``mixture`` is the
    teacher's share in what samples, α·q + (1−α)·p; a trainer sets that up, it changes no arithmetic here. Source:
    MiniLLM, arXiv:2306.08543, whose printed divisor is one short; its code is the inclusive form and whitens padding.
    """

    normalise: bool = True
    inclusive: bool = False
    gamma: float = 1.0
    whiten: bool = False
    mixture: float = 0.2

    @property
    def span(self) -> Scope:
        return Scope.BATCH if self.whiten else Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(0 <= self.mixture < 1, f"mixture must lie in [0, 1), got {self.mixture}")
        self.refuse(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        self.refuse(self.inclusive or self.gamma == 1, "gamma discounts the inclusive form only; set inclusive=true")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        g, mask = self.gap(ctx), ctx.mask
        if self.inclusive:
            x = teachers.later_sum(g, mask, self.gamma)
            if self.normalise:
                x = x / teachers.later_sum(torch.ones_like(g), mask).clamp(min=1)
        else:
            x = teachers.future(g, mask, mean=self.normalise)
        return (groups.whiten(x, mask) if self.whiten else x), state


@dataclass(frozen=True)
class _WithReward(Advantage):
    reward: Advantage = GroupZScore()  # noqa: RUF009 - frozen
    teacher: TeacherGap = TeacherGap()

    @property
    def group_relative(self) -> bool:
        return False

    def both(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Tensor, Any]:
        """(the reward's advantages [B,T], the teacher's [B,T], state)."""
        found = self.reward(rewards, ctx, state)
        return found[0], self.teacher(rewards, ctx, None)[0], found[-1]


@dataclass(frozen=True)
class Mix(_WithReward):
    """``share·A + (1−share)·g``: a reward's advantage and a teacher's, convex. A row without a hint has g = 0.

    A is in units of its spread, g in nats: it may be −10. Source: SDPO eq. 3, arXiv:2601.20802; ``share`` .5 is ours.
    """

    share: float = 0.5

    def check(self) -> None:
        self.refuse(0 <= self.share <= 1, f"share must lie in [0, 1], got {self.share}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        own, g, handed_on = self.both(rewards, ctx, state)
        return self.share * own + (1 - self.share) * g, handed_on


@dataclass(frozen=True)
class Added(_WithReward):
    """``A + g``: a teacher's advantage beside a reward's, with the coefficient of its stage (``teacher.coef``).

    Added after the group's z-score, never before a whitening. Source: tinker, slime, miles; MOPD, arXiv:2601.02780.
    """

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        own, g, handed_on = self.both(rewards, ctx, state)
        return own + g, handed_on


@dataclass(frozen=True)
class FixedNegative(Advantage):
    """``value`` on the ⌊share·n⌋ least likely of the batch's n tokens, 0 elsewhere: no teacher, no reward.

    ``adaptive``: −½ − ½·(H − H_min)/(H_max − H_min) over those tokens in place of ``value``, H their entropy under the
    policy (all equal: −1). The control that every claim for a teacher's signal is held against: pushing unlikely tokens
    down alone. Use with the weight `LeastLikely` of the same share. Source: OPSA, arXiv:2608.31046.
    """

    share: float = 0.2
    value: float = -0.5
    adaptive: bool = True

    _scope = Scope.BATCH

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_old"} | ({"entropy"} if self.adaptive else set()))

    def check(self) -> None:
        self.refuse(0 < self.share <= 1, f"share must lie in (0, 1], got {self.share}")
        self.refuse(self.value < 0, f"value must be negative (a positive one collapses), got {self.value}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        chosen = teachers.least_likely(ctx.read("logp_old").detach(), ctx.mask, self.share)
        if not self.adaptive:
            return self.value * chosen.to(rewards.dtype), state
        spread = teachers.scaled_between(ctx.read("entropy").detach(), chosen).to(rewards.dtype)
        return -(0.5 + 0.5 * spread) * chosen, state
