"""Advantages from outcomes: how much better a rollout did than its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kenpo.ops import groups
from kenpo.stages.base import Advantage, Scope
from kenpo.stages.context import Context


@dataclass(frozen=True)
class GroupZScore(Advantage):
    """``(R − mean) / (std + eps)`` within the group, the same on every token of the response.

    ``ddof``: degrees of freedom taken off in the variance (1: sample, 0: population). ``inside``: eps stands under the
    root, ``√(var + eps)``. Exactly 0 in a uniform or single-member group. Source: GRPO, arXiv:2402.03300; the paper
    gives neither ddof nor eps, the values are those of verl and SkyRL.
    """

    eps: float = 1e-6
    ddof: int = 1
    inside: bool = False

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")
        self.refuse(self.ddof in (0, 1), f"ddof must be 0 or 1, got {self.ddof}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        if self.inside:
            variance = groups.group_variance(rewards, ctx.group, ctx.selected, self.ddof)
            a = groups.centred(rewards, ctx.group, ctx.selected) / (variance + self.eps).sqrt()
        else:
            a = groups.zscore(rewards, ctx.group, ctx.selected, eps=self.eps, ddof=self.ddof)
        return ctx.per_token(a), state


@dataclass(frozen=True)
class GroupCentred(Advantage):
    """``R − mean`` within the group, without a standard deviation. Exactly 0 in a uniform or single-member group.

    Source: Dr. GRPO, arXiv:2503.20783.
    """

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        return ctx.per_token(groups.centred(rewards, ctx.group, ctx.selected)), state


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """``R_i −`` mean of the other members of the group: `GroupCentred` × G/(G−1); 0 for a rollout that is alone.

    Source: RLOO, arXiv:2402.14740.
    """

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        return ctx.per_token(groups.leave_one_out(rewards, ctx.group, ctx.selected)), state


@dataclass(frozen=True)
class GlobalWhiten(Advantage):
    """Outcomes whitened over all trainable tokens of the rollout batch: ``(x − mean)/√(var + eps)``, ddof 1.

    ``baseline="group"`` first takes off the group's mean (0 for a rollout that is alone in its group: `kenpo train`
    refuses one sample per prompt there). Exactly 0 if all tokens carry the same outcome.
    Source: REINFORCE++, arXiv:2501.03262.
    """

    eps: float = 1e-8
    baseline: Literal["none", "group"] = "none"

    _scope = Scope.BATCH

    @property
    def group_relative(self) -> bool:
        return self.baseline == "group"

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        outcome = rewards
        if self.baseline == "group":
            outcome = groups.centred(rewards, ctx.group, ctx.selected)
        return groups.whiten(ctx.per_token(outcome), ctx.mask, eps=self.eps), state
