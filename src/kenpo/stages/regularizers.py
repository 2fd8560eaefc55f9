"""Penalties that stand beside the objective and carry their own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kenpo.ops import divergences, ratios
from kenpo.stages.base import Regularizer
from kenpo.stages.context import Context


@dataclass(frozen=True)
class KLToReference(Regularizer):
    """``beta`` × an estimate of KL(π_θ‖π_ref) from the sampled token, d = log π_ref − log π_θ.

    ``k3``: e^d − 1 − d (the default of GRPO: never negative; its gradient 1 − e^d is not that of the KL).
    ``k2``: d²/2 (its gradient is, on policy, the KL's). ``k1``: −d (its expected gradient is 0: refused as a loss).
    Averaged as the algorithm's objective. Source: GRPO, arXiv:2402.03300, eq. 4; d saturates at ±20.
    """

    beta: float = 0.04
    estimator: Literal["k1", "k2", "k3"] = "k3"

    _needs = frozenset({"logp", "logp_ref"})

    def check(self) -> None:
        self.refuse(self.beta >= 0, f"beta must not be negative, got {self.beta}")
        self.refuse(self.estimator != "k1", "k1 as a loss has an expected gradient of 0; use k2 or k3")

    @property
    def off(self) -> str | None:
        return "beta is 0" if self.beta == 0 else None

    @property
    def charges_kl(self) -> bool:
        return self.beta > 0

    def __call__(self, ctx: Context) -> Tensor:
        d = -ratios.log_ratio(ctx.logp, ctx.read("logp_ref"), ctx.mask)
        return self.beta * (divergences.k3(d) if self.estimator == "k3" else divergences.k2(d))


@dataclass(frozen=True)
class EntropyBonus(Regularizer):
    """``−coef`` × the policy's full-vocabulary entropy, averaged as the algorithm's objective."""

    coef: float = 0.01

    _needs = frozenset({"entropy"})

    @property
    def off(self) -> str | None:
        return "coef is 0" if self.coef == 0 else None

    def __call__(self, ctx: Context) -> Tensor:
        return -self.coef * ctx.read("entropy")
