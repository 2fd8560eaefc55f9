"""Weights that take the importance ratio's place with an eye on saturated tokens and rare responses (ReCo)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.ops import masked, ratios
from kenpo.stages.base import Scope, Weight
from kenpo.stages.context import Context


@dataclass(frozen=True)
class VarianceRatio(Weight):
    """``v_t = p(1−p) / (p_old(1−p_old))``, p = π_θ(y_t): the Bernoulli variance ratio instead of the ratio p/p_old.

    Tokens that have saturated are damped: from .9 to .95, v = .53 where the ratio is 1.06. log v saturates at ±20.
    Source: ReCo, arXiv:2607.26862.
    """

    _needs = frozenset({"logp", "logp_old"})
    is_ratio = True

    @property
    def distance(self) -> tuple[str, str]:
        return "policy", "old"

    def __call__(self, ctx: Context) -> Tensor:
        return ratios.log_variance_ratio(ctx.logp.detach(), ctx.read("logp_old").detach()).exp()


@dataclass(frozen=True)
class InverseLikelihood(Weight):
    """``1 / π̄_old(y)`` on each token of a response, π̄ the geometric mean of its token probabilities under π_old.

    Responses that were unlikely to be sampled weigh more. log of it saturates at 20. The geometric mean is ours: the
    source says a probability of the response, and a product would overflow. Source: ReCo, arXiv:2607.26862.
    """

    _needs = frozenset({"logp_old"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        surprisal = -masked.row_mean(ctx.read("logp_old").detach(), ctx.mask)
        return ctx.per_token(ratios.saturate(surprisal).exp())
