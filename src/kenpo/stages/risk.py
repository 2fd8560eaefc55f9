"""Advantages of bundles of questions: how the bad and middling cases of a score's distribution are doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kenpo.ops import groups, masked, risk, sampling
from kenpo.stages.base import Advantage, Scope
from kenpo.stages.context import Context


@dataclass(frozen=True)
class QuantileRisk(Advantage):
    """``A(z) = −(1+ω)(q_α − z)⁺ + (z − q_α)⁺ − (z − q_β)⁺ + q_α − q_β`` of a bundle's score z.

    The same for all its members. ``bundle`` questions, in the order of their group numbers, make G bundles: each takes
    one response of every question, z is the sum of their rewards. Below q_α a gain counts 1+ω, up to q_β it counts 1,
    above it nothing; A is never positive. A bundle with fewer members (the last questions, uneven groups) has z =
    bundle · their mean. ``pairing="shuffled"``: which responses meet is drawn by a hash of their log-probs, which no
    order of rows changes; "stored": the k-th with the k-th.

    ``form="masses"`` divides each part by its probability: ``(mix·tail + range)/(mix + 1)``, plus q_α − q_β in the
    range with ``baseline``, over the bundles' standard deviation (ddof 1, + 1e-6) with ``divide``; its mix is 1 + ω =
    mix·(β − α)/α, another number than ω. ``credit="sum_mean"`` shares a bundle's A by (reward − question mean).

    State: ``quantiles`` [2] float64. The first batch starts from its own; every batch reads them as the last one left
    them, then ``q ← q + lr·(level − share of z below q)``. Source: RiskPO, arXiv:2510.00911; ω is a third party's, the
    handling of incomplete bundles and the hash are ours; "masses" is the released code, which tracks no quantiles.
    """

    bundle: int = 5
    alpha: float = 0.2
    beta: float = 0.8
    omega: float = 0.5
    lr: float = 0.1
    pairing: Literal["shuffled", "stored"] = "shuffled"
    form: Literal["range", "masses"] = "range"
    mix: float = 1.5
    baseline: bool = False
    divide: bool = False
    credit: Literal["uniform", "sum_mean"] = "uniform"

    _scope = Scope.STREAM

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_sampler"} if self.pairing == "shuffled" else ())

    def check(self) -> None:
        self.refuse(self.bundle > 0, f"bundle must be positive, got {self.bundle}")
        ordered = 0 < self.alpha < self.beta < 1
        self.refuse(ordered, f"0 < alpha < beta < 1, got {self.alpha} and {self.beta}")
        self.refuse(self.omega >= 0, f"omega must not be negative, got {self.omega}")
        self.refuse(self.mix >= 0, f"mix must not be negative, got {self.mix}")
        self.refuse(0 <= self.lr <= 1, f"lr must lie in [0, 1], got {self.lr}")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        if not bool(ctx.selected.any()):
            return ctx.per_token(torch.zeros_like(rewards)), state
        members = self._bundles(ctx)
        place, number = groups.group_index(members)
        first = torch.full((number,), len(rewards), device=place.device)
        first = first.scatter_reduce(0, place, torch.arange(len(place), device=place.device), "amin")
        whole = torch.zeros_like(ctx.selected).index_fill(0, first, True) & ctx.selected  # one row of each bundle
        z = self.bundle * groups.group_mean(rewards, members, ctx.selected)
        levels = torch.tensor([self.alpha, self.beta], dtype=torch.float64, device=z.device)
        scores = z[whole].double()
        q = torch.quantile(scores, levels) if state is None else state["quantiles"].to(levels)
        a = self._advantage(z, whole, q.to(z.dtype))
        if self.credit == "sum_mean":
            a = self._shared(a, rewards, members, ctx)
        after = risk.quantile_step(q, levels, scores, self.lr)
        return ctx.per_token(a), {"quantiles": after.cpu()}

    def _bundles(self, ctx: Context) -> Tensor:
        """[B] the number of each row's bundle; rows that take no part have numbers of their own."""
        rows = ctx.selected.nonzero().flatten()
        question = groups.group_index(ctx.group[rows])[0]
        if self.pairing == "shuffled":
            rows = rows[torch.argsort(sampling.row_draws(ctx.read("logp_sampler"), ctx.mask)[rows], stable=True)]
            question = groups.group_index(ctx.group[rows])[0]
        order = torch.argsort(question, stable=True)
        rows, question = rows[order], question[order]
        size = torch.bincount(question)
        rank = torch.arange(len(rows), device=rows.device) - (size.cumsum(0) - size)[question]
        members = -1 - torch.arange(len(ctx.group), device=rows.device)
        members[rows] = question // self.bundle * len(ctx.group) + rank
        return members

    def _advantage(self, z: Tensor, whole: Tensor, q: Tensor) -> Tensor:
        if self.form == "range":
            return risk.risk_utility(z, q[0], q[1], self.omega)
        a = risk.risk_utility_released(
            z, q[0], q[1], alpha=self.alpha, beta=self.beta, mix=self.mix, baseline=self.baseline
        )
        if not self.divide:
            return a
        std = groups.group_std(z, torch.zeros_like(whole, dtype=torch.long), whole, 1)
        return a / (std + 1e-6)

    def _shared(self, a: Tensor, rewards: Tensor, members: Tensor, ctx: Context) -> Tensor:
        """`risk.sum_mean_credit` for bundles of any size."""
        lead = rewards - groups.group_mean(rewards, ctx.group, ctx.selected)
        total = groups.group_sum(lead, members, ctx.selected)
        even = total.abs() <= 1e-6
        equal = masked.divide(torch.ones_like(a), groups.group_count(members, ctx.selected, a))
        return a * torch.where(even, equal, lead / torch.where(even, torch.ones_like(total), total))
