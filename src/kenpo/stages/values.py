"""Losses beside the policy's: a critic's, and likelihood terms on rows that are right or given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.ops import returns
from kenpo.stages.aggregates import TokenMean
from kenpo.stages.base import Aggregate, Regularizer
from kenpo.stages.context import Context


@dataclass(frozen=True)
class ValueLoss(Regularizer):
    """``coef · ½ max((V − R)², (Vc − R)²)``, the mean over all trainable tokens: the loss of a critic.

    V is ``policy.values``, with its gradient; R the ``returns`` that the advantage handed on; Vc is V held within
    ±``clip`` of ``values_old`` (None: no clip). Tokens that a weight dropped count too, and so do rows of advantage 0.
    A trunk that carries policy and critic receives both gradients; a critic of its own, only this one.
    Source: PPO, arXiv:1707.06347, as released; coef .1 and clip .2 are TRL's.
    """

    clip: float | None = 0.2
    coef: float = 0.1

    _needs = frozenset({"values", "values_old", "returns"})

    def check(self) -> None:
        self.refuse(self.clip is None or self.clip > 0, f"clip must be positive, got {self.clip}")
        self.refuse(self.coef > 0, f"coef must be positive, got {self.coef}")

    @property
    def own_aggregate(self) -> Aggregate:
        return TokenMean()

    def __call__(self, ctx: Context) -> Tensor:
        target = ctx.returns
        old = ctx.read("values_old").to(target.dtype)
        return self.coef * returns.value_error(ctx.read("values"), old, target, self.clip)

    def clipped(self, ctx: Context) -> Tensor | None:
        """[B,T] bool: V moved further than ``clip`` towards its return, so that it has no gradient."""
        if self.clip is None:
            return None
        values, target = ctx.read("values").detach(), ctx.returns
        old = ctx.read("values_old").to(target.dtype)
        held = values.clamp(old - self.clip, old + self.clip)
        return (held != values) & ((held - target).abs() > (values - target).abs())


@dataclass(frozen=True)
class PositiveNLL(Regularizer):
    """``coef · −log π``, the mean over the tokens of right responses: those whose raw outcome exceeds ``above``.

    0 where there are none. Source: VAPO, arXiv:2504.05118 (coef .1).
    """

    coef: float = 0.1
    above: float = 0.0

    _needs = frozenset({"logp"})

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    @property
    def own_aggregate(self) -> Aggregate:
        return TokenMean()

    def rows(self, ctx: Context) -> Tensor:
        return ctx.mask & (ctx.rewards > self.above).unsqueeze(-1)

    def __call__(self, ctx: Context) -> Tensor:
        return -self.coef * ctx.logp


@dataclass(frozen=True)
class SupervisedNLL(Regularizer):
    """``coef · −log π``, the mean over the tokens of supervised rows (``origin`` 4): a corpus beside the rollouts.

    0 where there are none. Source: the pretraining mix of InstructGPT, arXiv:2203.02155 (PPO-ptx, coef 27.8).
    """

    coef: float = 27.8

    _needs = frozenset({"logp", "origin"})
    supervised = True

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    @property
    def own_aggregate(self) -> Aggregate:
        return TokenMean()

    def rows(self, ctx: Context) -> Tensor:
        return ctx.trainable & ctx.supervised.unsqueeze(-1)

    def __call__(self, ctx: Context) -> Tensor:
        return -self.coef * ctx.over(self.rows(ctx)).logp
