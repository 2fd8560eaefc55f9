"""Objectives that couple the responses of a group by their log-probs, without ratio or advantage: reconstructions.

A group's value stands in parts on its rows, so they go with the aggregate `ContrastMean`, which takes the mean over the
groups that decide something.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.ops import contrast, groups, masked
from kenpo.stages.base import Scope, Surrogate
from kenpo.stages.context import Context


@dataclass(frozen=True)
class GroupInfoNCE(Surrogate):
    """Each right response against the wrong ones of its group, by length-normalised log-prob s.

    ``(1/|P|) Σ_P log [e^((s_i−margin)/tau) / (e^((s_i−margin)/tau) + Σ_N e^(s_j/tau))]``, the mean over groups that
    hold both; P: responses above their group's mean. Empty responses take no part. A reconstruction of ConSPO,
    arXiv:2605.12969: tau, the margin, its place and its schedule are not public.
    """

    tau: float = 1.0
    margin: float = 0.0

    takes_ratio = False
    _scope = Scope.GROUP
    _needs = frozenset({"logp"})

    def check(self) -> None:
        self.refuse(self.tau > 0, f"tau must be positive, got {self.tau}")

    def decided(self, ctx: Context) -> Tensor:
        right = (ctx.advantages > 0).any(-1).to(ctx.advantages.dtype)
        return groups.group_varies(right, ctx.group, ctx.selected & ctx.mask.any(-1))

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        score = masked.row_mean(ctx.logp, ctx.mask)
        right = (ctx.advantages > 0).any(-1)
        taking_part = ctx.selected & ctx.mask.any(-1)
        value = contrast.info_nce(score, right, ctx.group, taking_part, tau=self.tau, margin=self.margin)
        return value.unsqueeze(-1).expand_as(ctx.logp)


@dataclass(frozen=True)
class GibbsGap(Surrogate):
    """``mean z − log mean e^z`` of a group, ``z_i = R_i/beta − log(π_θ(y_i)/π_ref(y_i))``: 0 iff all z are equal.

    Then the policy is the reference's Gibbs policy of the reward. The mean over groups whose raw outcomes differ, empty
    responses left out; a group's value stands on its responses with a non-zero advantage, in equal parts. Log-ratios
    don't saturate. A reconstruction of GGPO, arXiv:2610.20814: its scale, stabiliser and the refresh of the
    reference are not public.
    """

    beta: float = 1.0

    takes_ratio = False
    any_samples = True
    _scope = Scope.GROUP
    _needs = frozenset({"logp", "logp_ref"})

    def check(self) -> None:
        self.refuse(self.beta > 0, f"beta must be positive, got {self.beta}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        drift = masked.row_sum(ctx.logp - ctx.read("logp_ref"), ctx.mask)  # finite whatever its size: no saturation
        taking_part = ctx.selected & ctx.mask.any(-1)
        z = masked.select(ctx.rewards.to(drift.dtype), taking_part) / self.beta - drift
        carriers = (ctx.advantages != 0).any(-1)
        value = contrast.gibbs_gap(z, ctx.rewards, ctx.group, taking_part, carriers)
        return value.unsqueeze(-1).expand_as(ctx.logp)
