"""The query's side: terms on prompt tokens (``rollouts.prompt_mask``), which the policy did not sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kenpo.errors import InputError, NonFiniteError
from kenpo.ops import divergences, masked, ratios
from kenpo.stages.aggregates import SequenceMean
from kenpo.stages.base import Aggregate, Regularizer, Scope, Weight
from kenpo.stages.context import Context


def query_rows(ctx: Context) -> Tensor:
    """[B,T] bool: the prompt positions to score, of selected rollouts."""
    rows = ctx.read("prompt_mask")
    if rows.numel() and bool(rows[:, 0].any()):
        raise InputError("prompt_mask: position 0 is scored, but no token precedes it; clear column 0")
    return rows & ctx.selected.unsqueeze(-1)


def query_view(ctx: Context, *fields: str) -> Context:
    """`ctx` over the query's tokens. Raises `NonFiniteError` if one of `fields` holds NaN or an infinity there."""
    view = ctx.over(query_rows(ctx))
    for name in fields:
        where = masked.first_bad(view.read(name), view.mask)
        if where:
            raise NonFiniteError(
                f"{name}: a bad number at the scored prompt position {list(where)} (rollout, token); "
                "score prompt_mask's positions as well, or clear them"
            )
    return view


@dataclass(frozen=True)
class QueryKL(Regularizer):
    """``alpha`` × k3 of d = log π_ref − log π_θ on the *query's* tokens: the model must not forget what it is asked.

    Averaged over a row's query tokens, then over rows. ``level="sequence"``: k3 of the query's summed d, saturated.
    Needs the policy's and the reference's log-probs at the positions of ``prompt_mask``.
    Source: ERPO, arXiv:2608.23311 (alpha 0.01 as released; 0.05 was better in an ablation).
    """

    alpha: float = 0.01
    level: Literal["token", "sequence"] = "token"

    _needs = frozenset({"logp", "logp_ref", "prompt_mask"})

    def check(self) -> None:
        self.refuse(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")

    @property
    def off(self) -> str | None:
        return "alpha is 0" if self.alpha == 0 else None

    @property
    def span(self) -> Scope:
        return Scope.SEQUENCE if self.level == "sequence" else Scope.TOKEN

    @property
    def own_aggregate(self) -> Aggregate:
        return SequenceMean()

    def rows(self, ctx: Context) -> Tensor:
        return query_rows(ctx)

    def __call__(self, ctx: Context) -> Tensor:
        query = query_view(ctx, "logp", "logp_ref")
        d = -ratios.log_ratio(query.logp, query.read("logp_ref"), query.mask)
        if self.level == "sequence":
            d = ratios.sequence_log_sum(d, query.mask).expand_as(d)
        return self.alpha * divergences.k3(d)


@dataclass(frozen=True)
class QueryWeight(Weight):
    """``clip(average/s, 0, 2)`` on each token of a response, s = −log π_ref(query), summed over ``prompt_mask``.

    ``average`` (nats): the mean of s over the data set, so that the weight is static; a batch's own mean would be
    another method. s is a sum, so long queries weigh little. Source: ERPO, arXiv:2608.23311.
    """

    average: float

    _needs = frozenset({"logp_ref", "prompt_mask"})
    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.average > 0, f"average must be positive, got {self.average}")

    def __call__(self, ctx: Context) -> Tensor:
        query = query_view(ctx, "logp_ref")
        surprisal = -masked.row_sum(query.read("logp_ref"), query.mask)
        w = (self.average / surprisal.clamp(min=self.average / 2)).clamp(0, 2)
        return ctx.per_token(w)
