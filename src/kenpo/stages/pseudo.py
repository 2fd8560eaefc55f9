"""Learning from one's own majority: who of a group trains, and what those who agree and those who don't learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenpo.ops import groups, masked, sampling, signals
from kenpo.stages.base import Advantage, Scope, Surrogate, Weight
from kenpo.stages.context import Context
from kenpo.stages.teachers import TeacherTerm


@dataclass(frozen=True)
class AgreementSplit(Advantage):
    """1 where the outcome is 1 (the response agrees with its group's majority), ``coef·(R − mean)/(std + eps)`` else.

    The z-score is over the whole group (``ddof``: taken off in the variance). A group of one answer is 1 throughout,
    one without any answer 0. Source: TTPO, arXiv:2608.27448, which has 1 and the coefficient in the loss.
    """

    coef: float = 0.1
    ddof: int = 0
    eps: float = 1e-6

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")
        self.refuse(self.ddof in (0, 1), f"ddof must be 0 or 1, got {self.ddof}")
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        z = groups.zscore(rewards, ctx.group, ctx.selected, eps=self.eps, ddof=self.ddof)
        return ctx.per_token(torch.where(rewards > 0, torch.ones_like(z), self.coef * z)), state


@dataclass(frozen=True)
class ShortestOfEach(Weight):
    """1 on the ``agreeing`` and the ``others`` shortest responses of a group, on their first ``tokens``; 0 elsewhere.

    A response agrees with its group's majority if its advantage is positive, and does not if it is negative. Of equal
    lengths a hash of the sampler's log-probs decides, which no order of rows changes. A response without trainable
    tokens is never taken. ``tokens`` None: all of them. ``each``: the agreeing and
    the others are averaged by themselves and their means added, instead of one mean over both.
    Source: TTPO, arXiv:2608.27448 (4 and 4 of 64; 1,024 tokens; eq. 8 has one mean, the algorithm's box has ``each``).
    """

    agreeing: int = 4
    others: int = 4
    tokens: int | None = 1024
    each: bool = False

    _needs = frozenset({"logp_sampler"})

    @property
    def span(self) -> Scope:
        return Scope.BATCH if self.each else Scope.GROUP

    def check(self) -> None:
        self.refuse(self.agreeing >= 0, f"agreeing must not be negative, got {self.agreeing}")
        self.refuse(self.others >= 0, f"others must not be negative, got {self.others}")
        self.refuse(self.agreeing + self.others > 0, "agreeing and others are both 0: nothing would train")
        self.refuse(self.tokens is None or self.tokens > 0, f"tokens must be positive, got {self.tokens}")

    def __call__(self, ctx: Context) -> Tensor:
        like = ctx.unit_mask(ctx.rewards.dtype)
        judged = masked.row_mean(ctx.advantages, ctx.mask)  # 0 on a row without tokens
        taken = self._shortest(judged > 0, self.agreeing, ctx)
        others = self._shortest(judged < 0, self.others, ctx)
        rows = (taken | others).to(like.dtype)
        if self.each:
            both = masked.count(taken | others, like)
            sizes = (masked.divide(both, masked.count(side, like)) for side in (taken, others))
            rows = sum(side * size for side, size in zip((taken, others), sizes, strict=True))  # type: ignore[assignment]
        return rows.unsqueeze(-1) * like * first_tokens(ctx.mask, self.tokens)

    def _shortest(self, able: Tensor, number: int, ctx: Context) -> Tensor:
        """[B] the `number` rows of each group with the fewest tokens among the able ones."""
        drawn = sampling.row_draws(ctx.read("logp_sampler"), ctx.mask)
        order = torch.argsort(drawn, stable=True)
        order = order[torch.argsort(ctx.lengths[order], stable=True)]
        order = order[able[order]]
        question = groups.group_index(ctx.group[order])[0]
        by_group = torch.argsort(question, stable=True)
        order, question = order[by_group], question[by_group]
        size = torch.bincount(question)
        rank = torch.arange(len(order), device=order.device) - (size.cumsum(0) - size)[question]
        return torch.zeros_like(able).index_fill(0, order[rank < number], True)


@dataclass(frozen=True)
class AgreementSwitch(Surrogate):
    """``−A·w·kl_teacher`` where A > 0, ``A·m·log π`` where A < 0: imitate on the majority's side, unlearn beside it.

    Per response, over its first ``tokens`` (those of `ShortestOfEach`), with H and D = ``kl_teacher`` scaled to [0, 1]
    by their least and greatest (0 if constant): ``w = H + D − H·D``; ``m = 1`` where ``s = −log π·(1 − H)`` is at least
    its median: unlikely tokens, unless the policy was undecided there. w, m and A are constants. No ratio.
    The teacher is the model, shown the majority's answer. Source: TTPO, arXiv:2608.27448.
    """

    divergence: TeacherTerm = TeacherTerm("forward")  # noqa: RUF009 - frozen
    tokens: int | None = 1024

    _needs = frozenset({"logp", "entropy"})
    _scope = Scope.SEQUENCE

    takes_ratio = False

    @property
    def reaches(self) -> frozenset[str]:
        return frozenset({"logp", "kl_teacher"})

    def check(self) -> None:
        self.refuse(self.tokens is None or self.tokens > 0, f"tokens must be positive, got {self.tokens}")

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        read = ctx.mask & first_tokens(ctx.mask, self.tokens)
        divergence = ctx.read("kl_teacher")
        undecided = signals.row_scaled(ctx.read("entropy").detach(), read)
        apart = signals.row_scaled(divergence.detach(), read)
        weight = undecided + apart - undecided * apart
        surprise = -ctx.logp.detach() * (1 - undecided)
        rows = torch.arange(len(read), device=read.device).unsqueeze(-1).expand_as(read)
        median = signals.group_median(surprise.flatten(), rows.flatten(), read.flatten()).view_as(surprise)
        penalised = (surprise >= median) & read
        gain = torch.where(ctx.advantages < 0, penalised * ctx.logp, -weight * divergence)
        return ctx.advantages * gain


def first_tokens(mask: Tensor, number: int | None) -> Tensor:
    """[B,T] bool: each row's first `number` trainable tokens; all of them for None."""
    return mask if number is None else mask & (mask.cumsum(-1) <= number)
