"""Advantages that come from values: a critic's, a frozen critic's, or the reward of the greedy response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops import divergences, groups, masked, ratios, returns, sampling, verdict
from kenpo.stages.base import Advantage, Scope, Shaping
from kenpo.stages.context import Context
from kenpo.types import Advantaged

Estimator = Literal["k1", "k2", "k3"]


def kl_cost(ctx: Context, estimator: str) -> Tensor:
    """[B,T] a sampled token's estimate of KL(π_old‖π_ref), d = log π_ref − log π_old saturated; a constant.

    ``k1``: −d; ``k2``: d²/2; ``k3``: e^d − 1 − d.
    """
    d = ratios.log_ratio(ctx.read("logp_ref"), ctx.read("logp_old"), ctx.mask)
    return {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}[estimator](d).detach()


@dataclass(frozen=True)
class GAE(Advantage):
    """``A_t = δ_t + γλ A_{t+1}``, ``δ_t = r_t + γ V_{t+1} − V_t``, from a critic's ``values_old`` (V before token t).

    The outcome stands on the last trainable token; with ``kl`` > 0 every token also earns −kl · an ``estimator`` of
    KL(π_old‖π_ref). "Next" is the next trainable token: masked positions are stepped over and count for nothing.
    ``terminal``: V after the last token. "zero": 0, a response ends there. "truncated": 0 at an end of sequence, and
    ``score_old`` [B] (the critic after the last token) where the response hit the length limit.
    ``adaptive`` (α; None: off) puts λ = max(0, 1 − 1/(α·n)) in ``lam``'s place, n the response's tokens.
    ``critic_lam`` (None: the same λ) is that of the returns, A + V, which a value loss reads as ``returns``; they are
    taken before ``whiten``: (A − mean)/√(var + 1e-8), ddof 1, over all trainable tokens of the rollout batch.
    ``both`` allows a KL in the loss beside ``kl``, which otherwise is refused as counted twice.

    Everything is a constant. A row without tokens gives nothing; uniform advantages whiten to 0.
    Source: PPO, arXiv:1707.06347, and GAE, arXiv:1506.02438, as TRL and verl have them; adaptive and critic_lam from
    VAPO, arXiv:2504.05118. verl leaves whitened junk at masked positions; here they are 0.
    """

    gamma: float = 1.0
    lam: float = 0.95
    critic_lam: float | None = None
    adaptive: float | None = None
    whiten: bool = True
    kl: float = 0.0
    estimator: Estimator = "k1"
    terminal: Literal["zero", "truncated"] = "zero"
    both: bool = False

    makes_returns = True

    def check(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam), ("critic_lam", self.critic_lam)):
            self.refuse(value is None or 0 <= value <= 1, f"{name} must lie in [0, 1], got {value}")
        self.refuse(self.adaptive is None or self.adaptive > 0, f"adaptive must be positive, got {self.adaptive}")
        self.refuse(self.kl >= 0, f"kl must not be negative, got {self.kl}")

    @property
    def span(self) -> Scope:
        return Scope.BATCH if self.whiten else Scope.SEQUENCE

    @property
    def charges_kl(self) -> bool:
        return self.kl > 0 and not self.both

    @property
    def needs(self) -> frozenset[str]:
        charged = {"logp_old", "logp_ref"} if self.kl else set()
        cut = {"truncated", "score_old"} if self.terminal == "truncated" else set()
        return frozenset({"values_old", *charged, *cut})

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> Advantaged:
        earned = returns.at_last_token(rewards, ctx.mask)
        if self.kl:
            earned = earned - self.kl * kl_cost(ctx, self.estimator).to(earned.dtype)
        values = ctx.read("values_old").to(earned.dtype)
        last = None
        if self.terminal == "truncated":
            last = masked.select(ctx.read("score_old").to(earned.dtype), ctx.read("truncated"))
        lam = self.lam if self.adaptive is None else returns.adaptive_lambda(ctx.lengths, self.adaptive)
        a = returns.gae(earned, values, ctx.mask, gamma=self.gamma, lam=lam, last=last)
        critic = a
        if self.critic_lam is not None:
            critic = returns.gae(earned, values, ctx.mask, gamma=self.gamma, lam=self.critic_lam, last=last)
        return Advantaged(groups.whiten(a, ctx.mask) if self.whiten else a, critic + values, state)


@dataclass(frozen=True)
class GreedyBaseline(Advantage):
    """Return-to-go minus ``baseline`` [B], the reward of the current policy's greedy response to the same prompt.

    The outcome stands on the last token, with ``kl`` > 0 each token earns −kl · an ``estimator`` of KL(π_old‖π_ref), γ
    counts trainable tokens. A constant; no group is needed. Source: ReMax, arXiv:2310.10505.
    """

    gamma: float = 1.0
    kl: float = 0.0
    estimator: Estimator = "k1"
    both: bool = False

    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(0 <= self.gamma <= 1, f"gamma must lie in [0, 1], got {self.gamma}")
        self.refuse(self.kl >= 0, f"kl must not be negative, got {self.kl}")

    @property
    def charges_kl(self) -> bool:
        return self.kl > 0 and not self.both

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"baseline"} | ({"logp_old", "logp_ref"} if self.kl else set()))

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        earned = returns.at_last_token(rewards, ctx.mask)
        if self.kl:
            earned = earned - self.kl * kl_cost(ctx, self.estimator).to(earned.dtype)
        baseline = ctx.read("baseline").to(earned.dtype).unsqueeze(-1)
        return masked.select(returns.return_to_go(earned, ctx.mask, self.gamma) - baseline, ctx.mask), state


@dataclass(frozen=True)
class CriticVerdict(Shaping):
    """A frozen critic's verdict in the outcome's place: ``1[v − b(n) > tau]``, v = ``score_old`` [B], its value at the
    last token reached, finished or not.

    b is the offset of the response's length bin: ``offsets``, one more than the inner ``edges`` (in tokens); both
    empty: b = 0. ``tau`` and b come from `kenpo.ops.verdict.calibrate`; another length limit needs another fit. The
    comparison is strict. ``binarise=False`` gives v − b itself. ``labels`` is the share of rollouts that keep their own
    outcome: drawn by a hash of the row's tokens and ``seed``, the same wherever the row stands. Source: RFPO,
    arXiv:2609.37119, at 5,120 tokens; that labels are drawn by hash is ours.
    """

    tau: float = 0.5215
    edges: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    binarise: bool = True
    labels: float = 0.0
    seed: int = 0

    def check(self) -> None:
        fits = len(self.offsets) == (len(self.edges) + 1 if self.edges or self.offsets else 0)
        self.refuse(fits, f"offsets go with edges, one more: got {len(self.offsets)} and {len(self.edges)}")
        self.refuse(0 <= self.labels <= 1, f"labels is a share in [0, 1], got {self.labels}")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"score_old"} | ({"tokens", "logp_sampler"} if 0 < self.labels < 1 else set()))

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        v = ctx.read("score_old").to(rewards.dtype)
        if not bool(v[ctx.selected].isfinite().all()):
            raise InputError("critic_verdict: score_old holds a number that is not finite; mend the critic's scores")
        if self.offsets:
            v = v - verdict.length_offset(ctx.lengths, v.new_tensor(self.edges), v.new_tensor(self.offsets))
        judged = (v > self.tau).to(rewards.dtype) if self.binarise else v
        return torch.where(self._labelled(ctx), rewards, judged)

    def _labelled(self, ctx: Context) -> Tensor:
        """[B] rows that keep their own outcome."""
        if self.labels in (0.0, 1.0):
            return torch.full_like(ctx.selected, self.labels == 1.0)
        draws = sampling.token_draws(ctx.read("tokens"), ctx.read("logp_sampler"), ctx.mask, self.seed)
        return returns.at_last_token(torch.ones_like(draws[:, 0]), ctx.mask).mul(draws).sum(-1) < self.labels
