"""Advantages from outcomes: how much better a rollout did than its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from kenpo.ops import groups, masked, ratios, returns, signals
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
            std = groups.group_std(rewards, ctx.group, ctx.selected, self.ddof, inside=self.eps)
            a = masked.divide(groups.centred(rewards, ctx.group, ctx.selected), std)
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
class BatchScaled(Advantage):
    """``(R − group mean) / (std of the whole batch + eps)``, ddof 1: groups keep their relative spread.

    Exactly 0 in a uniform or single-member group. Source: TRL's ``scale_rewards="batch"`` (its eps, 1e-4).
    """

    eps: float = 1e-4

    _scope = Scope.BATCH

    @property
    def group_relative(self) -> bool:
        return True

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        return ctx.per_token(groups.batch_scaled(rewards, ctx.group, ctx.selected, eps=self.eps)), state


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """``R_i −`` mean of the other members of the group: `GroupCentred` × G/(G−1); 0 for a rollout that is alone.

    ``normalised``: over (std of the others, ddof 1, + ``eps``), undivided where the others are all equal or fewer than
    two: then a response keeps its plain lead. Source: RLOO, arXiv:2402.14740; the division is our reading of what
    others call a normalised leave-one-out.
    """

    normalised: bool = False
    eps: float = 1e-6

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        if self.normalised:
            a = groups.leave_one_out_normalised(rewards, ctx.group, ctx.selected, eps=self.eps)
            return ctx.per_token(a), state
        return ctx.per_token(groups.leave_one_out(rewards, ctx.group, ctx.selected)), state


@dataclass(frozen=True)
class GroupRobust(Advantage):
    """``(R − median) / (1.4826·MAD + eps)`` within the group, MAD the median of |R − median|.

    Outliers don't set the scale; 1.4826·MAD is the standard deviation of a normal sample. 0 for the whole group where
    MAD is 0, an outlier included: with rewards of 0 and 1 only a group that is split in half teaches. A median of an
    even number is the mean of the middle two. Source: ours, beside Dr. GRPO's centring (arXiv:2503.20783).
    """

    eps: float = 1e-6

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        return ctx.per_token(signals.robust_score(rewards, ctx.group, ctx.selected, self.eps)), state


@dataclass(frozen=True)
class Ones(Advantage):
    """1 on every trainable token, whatever the reward: for objectives that need none (supervised, pairwise, distilled).

    With `ScoreFunction` and `TokenMean` it is the cross-entropy of supervised training.
    """

    _scope = Scope.TOKEN
    judges = False

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        return ctx.unit_mask(rewards.dtype), state


@dataclass(frozen=True)
class GlobalWhiten(Advantage):
    """Outcomes whitened over all trainable tokens of the rollout batch: ``(x − mean)/√(var + eps)``, ddof 1.

    ``baseline="group"`` first takes off the group's mean (0 for a rollout that is alone in its group: `kenpo train`
    refuses one sample per prompt there). ``beta`` > 0 puts a KL into the reward: each token earns
    −beta·(log π_old − log π_ref), saturated, the outcome stands on the last token, and x is the sum from a
    token to the end, discounted by ``gamma`` per trainable token (below 1 also without a KL). ``both`` allows a KL in
    the loss beside beta. Exactly 0 if all tokens carry the same x. Source: REINFORCE++, arXiv:2501.03262.
    """

    eps: float = 1e-8
    baseline: Literal["none", "group"] = "none"
    beta: float = 0.0
    gamma: float = 1.0
    both: bool = False

    _scope = Scope.BATCH

    @property
    def group_relative(self) -> bool:
        return self.baseline == "group"

    @property
    def charges_kl(self) -> bool:
        return self.beta > 0 and not self.both

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"logp_old", "logp_ref"} if self.beta else set())

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")
        self.refuse(self.beta >= 0, f"beta must not be negative, got {self.beta}")
        self.refuse(0 < self.gamma <= 1, f"gamma must lie in (0, 1], got {self.gamma}")
        self.refuse(
            self.beta == 0 or self.baseline == "none",
            "with a group baseline the KL belongs in the loss: leave beta at 0 and add kl_to_reference",
        )

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        outcome = rewards
        if self.baseline == "group":
            outcome = groups.centred(rewards, ctx.group, ctx.selected)
        earned = returns.at_last_token(outcome, ctx.mask)
        if self.beta:
            drift = ratios.log_ratio(ctx.read("logp_old"), ctx.read("logp_ref"), ctx.mask)
            earned = earned - self.beta * drift
        plain = self.beta == 0 and self.gamma == 1
        x = ctx.per_token(outcome) if plain else returns.return_to_go(earned, ctx.mask, self.gamma)
        return groups.whiten(x, ctx.mask, eps=self.eps), state


@dataclass(frozen=True)
class ZeroSumKL(Advantage):
    """``C_i = A_i/s − beta·(D_i − mean_j D_j)``: the KL to the reference moved inside a group's zero-sum advantage.

    A = R − mean, s = max |A| in the group, D_i the mean over tokens of the full-vocabulary KL(π_θ‖π_ref) (0 for an
    empty row), all under the *current* policy and constant; so it is evaluated with the weights, once per minibatch of
    whole groups. Exactly 0 in a uniform or single-member group. C may differ from A in sign.
    Source: ZCPO, arXiv:2610.12161.
    """

    beta: float = 4.0

    _needs = frozenset({"kl_ref"})

    def check(self) -> None:
        self.refuse(self.beta >= 0, f"beta must not be negative, got {self.beta}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        divergence = masked.row_mean(ctx.read("kl_ref").detach(), ctx.mask).to(rewards.dtype)
        a = groups.zero_sum(rewards, divergence, ctx.group, ctx.selected, beta=self.beta)
        return ctx.per_token(a), state
