"""Weights that drop tokens or responses by a statistic of the sampler mismatch, or weigh another model's responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.ops import divergences, masked, trust
from kenpo.stages.base import Scope, Stage, Weight
from kenpo.stages.context import Context

Statistic = Literal[
    "token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1",
    "token_k2", "seq_sum_k2", "seq_mean_k2", "seq_max_k2",
    "token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3",
]  # fmt: skip

_ESTIMATORS = {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}


@dataclass(frozen=True)
class Rule(Stage):
    """One test of ρ = π_old/μ: per token, or by the response's sum, mean or maximum (0 for an empty response).

    With x = log ρ: k1 = −x, k2 = x²/2, k3 = ρ − 1 − x. k2 and k3 pass if ≤ `upper`. k1 passes if a ratio lies in
    [lower, upper], both inclusive; ``band_on`` must then say which: "rho", e^−k1, or "inverse_rho", e^k1 (verl's
    reading; they differ for bands that are not symmetric in log space). seq_mean_k1 tests the geometric mean,
    seq_sum_k1 the product.
    """

    statistic: Statistic
    upper: float
    lower: float | None = None
    band_on: Literal["rho", "inverse_rho"] | None = None

    def check(self) -> None:
        if self.statistic.endswith("k1"):
            self.refuse(self.lower is not None, f"{self.statistic} needs lower and upper, bounds on a ratio")
            self.refuse(self.band_on is not None, f"{self.statistic} needs band_on: 'rho' or 'inverse_rho'")
            self.refuse(0 <= (self.lower or 0) < self.upper, f"needs 0 ≤ lower < upper, got {self.lower}, {self.upper}")
        else:
            self.refuse(self.lower is None, f"{self.statistic} has no lower bound")
            self.refuse(self.band_on is None, f"band_on has no effect on {self.statistic}")
            self.refuse(self.upper >= 0, f"upper must not be negative, got {self.upper}")

    @property
    def per_token(self) -> bool:
        """Whether the rule judges tokens, not responses."""
        return self.statistic.startswith("token")

    def values(self, log_rho: Tensor, mask: Tensor) -> Tensor:
        """The statistic: [B,T] for a token rule, else [B,1]; 0 off the mask and for an empty response."""
        level, estimator = self.statistic.rsplit("_", 1)
        x = masked.select(_ESTIMATORS[estimator](log_rho), mask)
        if level == "token":
            return x
        if level == "seq_sum":
            return x.sum(-1, keepdim=True)
        if level == "seq_mean":
            return masked.row_mean(x, mask).unsqueeze(-1)
        highest = x.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) if x.shape[-1] else x.sum(-1, keepdim=True)
        return masked.select(highest, mask.any(-1, keepdim=True))

    def passes(self, log_rho: Tensor, mask: Tensor) -> Tensor:
        """Bool, shaped as `values`."""
        x = self.values(log_rho, mask)
        if self.lower is None:
            return x <= self.upper
        ratio = (x if self.band_on == "inverse_rho" else -x).exp()
        return (ratio >= self.lower) & (ratio <= self.upper)


@dataclass(frozen=True)
class Rejection(Weight):
    """1 where every rule on ρ = π_old/μ passes, else 0; a rule on responses speaks for all their tokens.

    ``rules``: `Rule` objects, or as settings a list of objects such as ``{"statistic": "seq_mean_k3", "upper": 0.01}``.
    The kept tokens carry no ρ: add `TruncatedIS` for that. verl takes rejected tokens out of the denominator
    (``over="kept"``), slime leaves them in ("all"). Source: verl's ``rollout_rs``.
    """

    rules: tuple[Rule, ...]
    anchor: Literal["old", "prox"] = "old"

    _needs = frozenset({"logp_sampler"})
    anchor_sensitive = True

    def __post_init__(self) -> None:
        if isinstance(self.rules, list | tuple):
            object.__setattr__(self, "rules", tuple(self._rule(r) for r in self.rules))
        super().__post_init__()

    def _rule(self, given: object) -> Rule:
        if isinstance(given, Rule):
            return given
        self.refuse(isinstance(given, dict), f"a rule is an object with statistic, lower and upper, got {given!r}")
        try:
            return Rule(**given)  # type: ignore[arg-type]
        except TypeError:
            known = ", ".join(Rule.__dataclass_fields__)
            self.refuse(False, f"rule {given!r}: its fields are {known}; statistic and upper are required")
            raise

    def check(self) -> None:
        self.refuse(len(self.rules) > 0, "needs at least one rule")

    @property
    def span(self) -> Scope:
        return Scope.TOKEN if all(r.per_token for r in self.rules) else Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        x, keep = ctx.log_correction(self.anchor), ctx.mask
        for rule in self.rules:
            keep = keep & rule.passes(x, ctx.mask)
        return keep


@dataclass(frozen=True)
class Compatibility(Weight):
    """How well another model's response fits this one: ``min(s, 1)`` where s > threshold, else 0.

    ``s = exp(mean log π_old − rollouts.logp_source)``: mean log-prob per token under the receiver, in its tokens, over
    that under the model that wrote it, in that model's tokens (they may have different tokenizers). Own responses have
    NaN in ``logp_source`` and weight 1; empty ones too. Source: GRAFT, arXiv:2609.37868.
    """

    threshold: float = 0.8

    _needs = frozenset({"logp_old", "logp_source"})
    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.threshold >= 0, f"threshold must not be negative, got {self.threshold}")

    def __call__(self, ctx: Context) -> Tensor:
        receiver = masked.row_mean(ctx.read("logp_old").detach(), ctx.mask)
        source = ctx.read("logp_source").to(receiver.dtype)
        own = source.isnan() | ~ctx.mask.any(-1)
        w = trust.compatibility(receiver, masked.select(source, ~own), self.threshold)
        return ctx.per_token(torch.where(own, torch.ones_like(w), w))
