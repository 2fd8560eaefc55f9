"""Rewards that come from what a group answered: votes, frequencies, the distance to a target distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops import groups, masked, signals
from kenpo.stages.base import Scope, Shaping
from kenpo.stages.context import Context


@dataclass(frozen=True)
class MajorityVote(Shaping):
    """1 where the response gives its group's most frequent ``answer``, else 0: a pseudo-label in the outcome's place.

    An answer of −1 (unparsable) has no vote and gets 0; where nobody answered, all get 0. ``ties``: "smallest" takes
    the smallest answer identity, whatever the order of rows; "first" the answer of the first row (the released code);
    "none" leaves a tied group without a label. Source: TTRL, arXiv:2504.16084.
    """

    ties: Literal["smallest", "first", "none"] = "smallest"

    _scope = Scope.GROUP
    _needs = frozenset({"answer"})

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        answer = ctx.read("answer")
        label, _ = signals.majority(answer, ctx.group, ctx.selected, self.ties)
        return ((answer == label) & (label >= 0)).to(rewards.dtype)


@dataclass(frozen=True)
class FrequencyAware(Shaping):
    """``1 − (f − 1/L)`` for a valid answer, ``invalid`` for any other: rarer answers earn more.

    Valid are the prompt's ``target_ids`` [B,K] (−1 padded), L of them; f is the share of the group's *valid* answers
    that equal this one. If all are valid and equally frequent, all earn 1 and the group has no advantage. Whether
    outputs are stripped and lower-cased before they get an identity is the task's choice. Source: GAPO,
    arXiv:2511.12596 (no released code).
    """

    invalid: float = -1.0

    _scope = Scope.GROUP
    _needs = frozenset({"answer", "target_ids"})

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        answer, targets = ctx.read("answer"), ctx.read("target_ids")
        listed = targets >= 0
        usable = ((targets == answer.unsqueeze(-1)) & listed).any(-1) & ctx.selected
        count = signals.answer_counts(answer, ctx.group, usable, rewards)
        answered = groups.group_sum(usable.to(rewards.dtype), ctx.group, ctx.selected)
        choices = masked.count(listed, rewards, -1)
        return signals.frequency_reward(count, answered, choices, usable, self.invalid)


@dataclass(frozen=True)
class TargetDistribution(Shaping):
    """Minus the slope of D(p, f) in the frequency of the response's answer: pulls a group to a target distribution.

    p is ``target_prob`` [B,K] at the answer's place in ``target_ids`` [B,K]; f = count/G in the group, where invalid
    answers stay in G. ``divergence``: "l2": p − f; "forward_kl": p/f − 1; "reverse_kl": log p − log f; "jsd":
    ½ (log m − log f), m = (p + f)/2. ``floor`` holds p and f from below inside quotients and logs; an answer outside
    the targets earns ``invalid``. f is an estimate from G answers: all but l2 are biased at small G.
    Source: MaD-RL; floor and invalid are a third party's protocol.
    """

    divergence: Literal["l2", "forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    floor: float = 1e-6
    invalid: float = -1.0

    _scope = Scope.GROUP
    _needs = frozenset({"answer", "target_ids", "target_prob"})

    def check(self) -> None:
        self.refuse(self.floor > 0, f"floor must be positive, got {self.floor}")

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        answer, targets, given = ctx.read("answer"), ctx.read("target_ids"), ctx.read("target_prob")
        if targets.shape != given.shape:
            raise InputError(f"target_prob has shape {list(given.shape)}, target_ids {list(targets.shape)}; pair them")
        hit = (targets == answer.unsqueeze(-1)) & (targets >= 0)
        usable = hit.any(-1) & ctx.selected
        p = masked.select(given.to(rewards.dtype), hit).sum(-1)
        size = groups.group_count(ctx.group, ctx.selected, rewards)
        f = masked.divide(signals.answer_counts(answer, ctx.group, usable, rewards), size)
        if self.divergence != "l2":
            p, f = p.clamp(min=self.floor), f.clamp(min=self.floor)
        return torch.where(usable, signals.divergence_reward(p, f, self.divergence), rewards.new_tensor(self.invalid))
