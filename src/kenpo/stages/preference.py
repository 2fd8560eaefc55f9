"""Surrogates of preferences: groups of any size in which a response of higher reward is preferred to one of lower.

Each is of group scope and takes no ratio. The advantage is `Ones`, the aggregate `ContrastMean`: the mean over a
group's decided pairs, then over the groups that have one. Ties leave, and so does a response without a trainable token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.ops import masked, pairs, ratios
from kenpo.stages.base import Scope, Surrogate
from kenpo.stages.context import Context


@dataclass(frozen=True)
class _Pairs(Surrogate):
    """What the losses of pairs share: which pairs there are, and where their values stand."""

    takes_ratio = False
    _scope = Scope.GROUP

    def _valid(self, ctx: Context) -> Tensor:
        return ctx.selected & ctx.mask.any(-1)

    def _pairs(self, ctx: Context) -> tuple[Tensor, Tensor]:
        return pairs.decided_pairs(ctx.rewards, ctx.group, self._valid(ctx))

    def scores(self, ctx: Context) -> Tensor:
        """[B] what a pair's two responses are compared by, with its gradient."""
        raise NotImplementedError

    def figures(self, ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
        """Accuracy and margin of the pairs under `scores`, and the mean score of the better and the worse responses."""
        scores, (better, worse) = self.scores(ctx).detach(), self._pairs(ctx)
        found = pairs.preference_figures(scores, ctx.rewards, ctx.group, self._valid(ctx))
        n = found["pair_margin"][1]
        for name, rows in (("chosen_reward", better), ("rejected_reward", worse)):
            found[name] = (pairs.mean_over_pairs(scores[rows], better, ctx.group).sum(), n)
        return found

    def _spread(self, losses: Tensor, better: Tensor, ctx: Context) -> Tensor:
        """[P] losses -> [B,T] objective: a group's mean, on its better rows."""
        rows = -pairs.mean_over_pairs(losses, better, ctx.group)
        return rows.unsqueeze(-1).expand(ctx.mask.shape)


@dataclass(frozen=True)
class PairLogistic(_Pairs):
    """``log σ(z)`` of each decided pair, ``z = s_i − s_j − gamma − margin_i``: Bradley-Terry on a score s.

    ``on="logp"``: ``s = beta · Σ_t (log π − log π_ref)``, summed over the response (``normalise``: its token mean;
    ``reference=False``: without log π_ref). ``on="score"``: ``s = beta · score`` of a reward model. Nothing saturates.
    ``loss`` and ``smoothing`` e: "sigmoid"; "conservative" and "robust" as in `kenpo.ops.pairs.logistic`.
    ``gamma``: a target margin of z; ``gamma_beta_ratio``: the same as gamma/beta (give one of them). ``margin``: also
    take off ``rollouts.margin`` of the better response. ``centring`` c adds c·(s_i + s_j)² to the loss of a pair of
    scores, which have no zero of their own. Sources: reward models, Llama 2, arXiv:2307.09288 (margin), and
    arXiv:2312.09244 (centring); DPO, arXiv:2305.18290; SimPO, arXiv:2405.14734.
    """

    on: Literal["logp", "score"] = "logp"
    beta: float = 0.1
    loss: Literal["sigmoid", "conservative", "robust"] = "sigmoid"
    smoothing: float = 0.0
    reference: bool = True
    normalise: bool = False
    gamma: float = 0.0
    gamma_beta_ratio: float = 0.0
    margin: bool = False
    centring: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        terms = {"score"} if self.on == "score" else {"logp", "logp_ref"} if self.reference else {"logp"}
        return frozenset(terms | ({"margin"} if self.margin else set()))

    def check(self) -> None:
        self.refuse(self.beta > 0, f"beta must be positive, got {self.beta}")
        self.refuse(0 <= self.smoothing < 0.5, f"smoothing must lie in [0, 0.5), got {self.smoothing}")
        self.refuse(
            self.loss != "sigmoid" or self.smoothing == 0,
            f"smoothing {self.smoothing} has no effect on the sigmoid loss; set loss='conservative' or 'robust'",
        )
        self.refuse(
            not (self.gamma and self.gamma_beta_ratio),
            "gamma and gamma_beta_ratio are one number in two units; give one of them",
        )
        self.refuse(self.centring >= 0, f"centring must not be negative, got {self.centring}")
        if self.on == "score":
            self.refuse(
                self.reference and not self.normalise,
                "a score has neither a reference nor a length; leave reference and normalise alone",
            )
        else:
            self.refuse(self.centring == 0, "log-probs have a zero of their own; centring is for on='score'")

    def scores(self, ctx: Context) -> Tensor:
        """[B] s, with its gradient; 0 on responses that take no part. Implicit rewards, where on="logp"."""
        if self.on == "score":
            return self.beta * masked.select(ctx.read("score"), self._valid(ctx))
        x = ctx.logp - ctx.read("logp_ref") if self.reference else ctx.logp
        return self.beta * (masked.row_mean if self.normalise else masked.row_sum)(x, ctx.mask)

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        s, (better, worse) = self.scores(ctx), self._pairs(ctx)
        z = s[better] - s[worse] - (self.gamma + self.beta * self.gamma_beta_ratio)
        if self.margin:
            z = z - ctx.read("margin")[better].to(z.dtype)
        losses = pairs.logistic(z, self.loss, self.smoothing)
        if self.centring:
            losses = losses + self.centring * (s[better] + s[worse]) ** 2
        return self._spread(losses, better, ctx)


@dataclass(frozen=True)
class PairSquared(_Pairs):
    """``−(h − 1/(2·beta))²``, ``h`` = better's minus worse's log-ratio to the reference, summed over the response.

    ``normalise``: each side's divided by its tokens. Nothing saturates. Source: IPO, arXiv:2310.12036 (summed, as in
    OpenRLHF); TRL divides by the length.
    """

    beta: float = 0.1
    normalise: bool = False

    _needs = frozenset({"logp", "logp_ref"})

    def check(self) -> None:
        self.refuse(self.beta > 0, f"beta must be positive, got {self.beta}")

    def scores(self, ctx: Context) -> Tensor:
        """[B] ``beta`` times the log-ratio: the implicit reward."""
        return self.beta * self._log_ratio(ctx)

    def _log_ratio(self, ctx: Context) -> Tensor:
        pooled = masked.row_mean if self.normalise else masked.row_sum
        return pooled(ctx.logp - ctx.read("logp_ref"), ctx.mask)

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        s, (better, worse) = self._log_ratio(ctx), self._pairs(ctx)
        return self._spread((s[better] - s[worse] - 1 / (2 * self.beta)) ** 2, better, ctx)


@dataclass(frozen=True)
class TurnDensityRatio(_Pairs):
    """``C·w_i − e^(w_j)`` of each decided pair (i better), ``w = Σ_t om_t·(log π − log π_ref)``: a density ratio learnt
    turn by turn.

    ``om`` = ``low`` on a turn whose mean log π_ref exceeds log ``pivot``, else ``high``; turns from ``rollouts.turn``,
    observations masked out. ``chosen_factor``: "literal" ``C = exp(Σ_t (1−om_t)·log π_ref)``, which vanishes on long
    trajectories; "length_normalised": the mean in the sum's place (ours); "one". w_j saturates at ±20 (ours).
    Source: tlm-DRE, arXiv:2609.16760.
    """

    low: float = 0.2
    high: float = 1.0
    pivot: float = 0.9
    chosen_factor: Literal["literal", "length_normalised", "one"] = "literal"

    _needs = frozenset({"logp", "logp_ref", "turn"})

    def check(self) -> None:
        self.refuse(0 <= self.low <= 1 and 0 < self.high <= 1, f"weights lie in [0, 1], got {self.low}, {self.high}")
        self.refuse(0 < self.pivot < 1, f"pivot is a probability in (0, 1), got {self.pivot}")

    def turn_weights(self, ctx: Context) -> Tensor:
        """[B,T] om on each trainable token; a constant."""
        ref = ctx.read("logp_ref").detach()
        sure = pairs.turn_means(ref, ctx.read("turn"), ctx.mask).exp() > self.pivot
        return torch.where(sure, ref.new_tensor(self.low), ref.new_tensor(self.high))

    def chosen_factors(self, ctx: Context) -> Tensor:
        """[B] C of each response; a constant."""
        left_over = (1 - self.turn_weights(ctx)) * ctx.read("logp_ref").detach()
        if self.chosen_factor == "one":
            return torch.ones_like(left_over[:, 0])
        pooled = masked.row_sum if self.chosen_factor == "literal" else masked.row_mean
        return pooled(left_over, ctx.mask).exp()

    def scores(self, ctx: Context) -> Tensor:
        """[B] w, the weighted log-ratio."""
        return masked.row_sum(self.turn_weights(ctx) * (ctx.logp - ctx.read("logp_ref")), ctx.mask)

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        w, (better, worse) = self.scores(ctx), self._pairs(ctx)
        losses = ratios.saturate(w[worse]).exp() - self.chosen_factors(ctx)[better] * w[better]
        return self._spread(losses, better, ctx)
