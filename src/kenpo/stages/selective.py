"""Selective importance sampling: a seeded test decides which off-policy tokens count as on-policy ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenpo.ops import ratios, sampling
from kenpo.stages.base import Ratio, Scope
from kenpo.stages.context import Context
from kenpo.stages.ratios import SequenceRatio, TokenRatio


@dataclass(frozen=True)
class SelectiveRatio(Ratio):
    """1 (with a gradient: π/sg[π]) on tokens that pass a rejection test as the policy's own, `base` on the others.

    A token passes with probability ``min(1, r/M)``, M the largest π_θ/π_old over π_old's top K (``topk_ids`` with
    ``topk_logp_old`` and ``topk_logp``); outside the top K never. The draw is a hash of `seed`, the token, its place
    among the response's tokens and its ``logp_old``, so it depends on neither row order, padding nor how the batch is
    cut, and is the same in every update of a batch. Source: SIS, arXiv:2607.04728 (authors' K: 100). The corrected
    weight is biased: its expectation under π_old is below 1.
    """

    base: TokenRatio | SequenceRatio = TokenRatio()  # noqa: RUF009 - frozen
    seed: int = 0

    _needs = frozenset({"logp", "logp_old", "tokens", "topk_ids", "topk_logp_old", "topk_logp"})
    _scope = Scope.SEQUENCE

    @property
    def distance(self) -> tuple[str, str]:
        return "policy", "old"

    def __call__(self, ctx: Context) -> Tensor:
        own = ratios.through_own_token(torch.ones_like(ctx.logp), ctx.log_ratio("old"))
        return torch.where(self.accepted(ctx), own, self.base(ctx))

    def draws(self, ctx: Context) -> Tensor:
        """[B,T] the pseudo-random numbers in [0, 1) that decide."""
        return sampling.token_draws(ctx.read("tokens"), ctx.read("logp_old").detach(), ctx.mask, self.seed)

    def accepted(self, ctx: Context) -> Tensor:
        """[B,T] bool: tokens that count as the policy's own."""
        with torch.no_grad():
            ids = ctx.read("topk_ids")
            change = ratios.saturate(ctx.read("topk_logp") - ctx.read("topk_logp_old"))
            inside = (ids == ctx.read("tokens").unsqueeze(-1)).any(-1)
            chance = sampling.acceptance(ctx.log_ratio("old"), change, ids >= 0, inside)
            return (self.draws(ctx) < chance) & ctx.mask
