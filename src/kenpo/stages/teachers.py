"""Divergences from a teacher: as the objective, as a penalty beside a reward, and the weights that go with them.

p is the policy, q the teacher, a constant. ``policy.kl_teacher`` [B,T] is the divergence that `TeacherTerm` describes,
over the vocabulary at each position of the policy's own response; ``rollouts.hinted`` [B] says which rows have a
teacher (absent: all).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.divergence import Divergence, Term
from kenpo.ops import masked, ratios, teachers
from kenpo.stages.aggregates import TokenMean
from kenpo.stages.base import Aggregate, Regularizer, Scope, Stage, Surrogate, Weight
from kenpo.stages.context import Context


@dataclass(frozen=True)
class TeacherTerm(Stage):
    """Which divergence ``policy.kl_teacher`` is; the fields are those of `kenpo.divergence.Divergence`.

    ``temperature`` divides the logits of both models; nothing is multiplied by T².
    """

    kind: Literal["forward", "reverse", "jsd"] = "jsd"
    weight: float = 0.5
    temperature: float = 1.0
    top: int | None = None
    owner: Literal["student", "teacher"] = "student"
    rest: Literal["tail", "renormalised", "generalised"] = "tail"
    clip: float | None = None

    _needs = frozenset({"kl_teacher"})

    def check(self) -> None:
        self.refuse(self.temperature > 0, f"temperature must be positive, got {self.temperature}")
        assert self.term.divergence  # refuses what is no divergence

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.term,)

    @property
    def term(self) -> Term:
        """What the models are asked for."""
        d = Divergence(self.kind, self.weight, self.top, self.owner, self.rest, self.clip)
        return Term("kl_teacher", "teacher", d, self.temperature)


@dataclass(frozen=True)
class MinimiseTerm(Surrogate):
    """``−kl_teacher``: the divergence alone. Advantage `Ones`, so that weights, masks and counts apply.

    The gradient is that at fixed prefixes: none goes through the sampling.
    """

    divergence: TeacherTerm = TeacherTerm()

    takes_ratio = False

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        return -ctx.read("kl_teacher")


@dataclass(frozen=True)
class TermPenalty(Regularizer):
    """``coef · kl_teacher`` beside another objective, on hinted rows, averaged as that objective.

    ``weight="ratio"``: times the detached ratio to the sampler, which makes an expectation under the sampler one under
    the policy, token by token (MiniLLM, arXiv:2306.08543). Alone: SDPG, arXiv:2606.04036.
    """

    divergence: TeacherTerm = TeacherTerm("reverse")
    coef: float = 1.0
    weight: Literal["none", "ratio"] = "none"

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"logp", "logp_sampler"} if self.weight == "ratio" else set())

    @property
    def reaches(self) -> frozenset[str]:
        return frozenset({"kl_teacher"})

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    def __call__(self, ctx: Context) -> Tensor:
        penalty = self.coef * ctx.read("kl_teacher")
        return penalty * ctx.log_ratio("sampler").detach().exp() if self.weight == "ratio" else penalty


@dataclass(frozen=True)
class SampledGap(Regularizer):
    """``coef · sg(log p − log q) · log p``: the reverse KL's gradient from the sampled token, beside another objective.

    On hinted rows only, with a mean over their own tokens. Source: SDPO in TRL, where losses are mixed; mixed
    advantages are `Mix`, the same only on policy with equal denominators.
    """

    coef: float = 1.0

    _needs = frozenset({"logp", "logp_teacher"})

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    def __call__(self, ctx: Context) -> Tensor:
        gap = ratios.saturate(ctx.logp - ctx.read("logp_teacher")).detach()
        return self.coef * gap * ctx.logp

    def rows(self, ctx: Context) -> Tensor | None:
        return ctx.mask & ctx.hinted.unsqueeze(-1)

    @property
    def own_aggregate(self) -> Aggregate | None:
        return TokenMean()


@dataclass(frozen=True)
class SquaredDrift(Regularizer):
    """``coef · log²(π_θ/anchor)`` on the sampled token: a spring to the policy that sampled. Source: prime-rl."""

    coef: float = 1e-3
    anchor: Literal["old", "sampler"] = "sampler"

    _needs = frozenset({"logp"})

    def check(self) -> None:
        self.refuse(self.coef >= 0, f"coef must not be negative, got {self.coef}")

    def __call__(self, ctx: Context) -> Tensor:
        return self.coef * ctx.log_ratio(self.anchor) ** 2


@dataclass(frozen=True)
class Hinted(Weight):
    """1 on rows that a teacher with a hint scored, 0 on the others (``rollouts.hinted``; absent: 1 everywhere).

    With ``over="kept"`` in the aggregate the others leave the denominator as well. The fields say how a trainer makes
    the teacher (``--teacher hint``) and change no arithmetic here: ``by`` "peer", the hint is the group's first other
    response of reward at least ``threshold``, "column", it stands in the task, or "majority", it is the group's most
    frequent answer (of equally frequent ones that of the smallest identity); ``average``, how far the teacher's
    weights follow the policy's after each update (0: as the run began, 1: the policy itself). Source: SDPO,
    arXiv:2601.20802.
    """

    by: Literal["peer", "column", "majority"] = "peer"
    threshold: float = 0.5
    average: float = 0.05

    _needs = frozenset({"hinted"})
    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(0 <= self.average <= 1, f"average must lie in [0, 1], got {self.average}")

    def __call__(self, ctx: Context) -> Tensor:
        return ctx.hinted.unsqueeze(-1) & ctx.mask


@dataclass(frozen=True)
class CappedRatio(Weight):
    """``min(sg[π_θ/π_old], cap)``: the ratio as a bounded constant, for a surrogate without one.

    Source: SDPO, arXiv:2601.20802 (cap 2).
    """

    cap: float = 2.0
    anchor: Literal["old", "sampler"] = "old"

    _needs = frozenset({"logp"})
    is_ratio = True

    def check(self) -> None:
        self.refuse(self.cap > 0, f"cap must be positive, got {self.cap}")

    def __call__(self, ctx: Context) -> Tensor:
        return ctx.log_ratio(self.anchor).detach().exp().clamp(max=self.cap)


@dataclass(frozen=True)
class PrefixShare(Weight):
    """``1 + boost·(1 − earlier |A| / the response's |A|)``: tokens at the start weigh more while little was said.

    In [1, 1+boost]; 1 on a response whose advantages are all 0. Source: IW-OPD, arXiv:2606.22600 (boost .5).
    """

    boost: float = 0.5

    _scope = Scope.SEQUENCE

    def check(self) -> None:
        self.refuse(self.boost >= 0, f"boost must not be negative, got {self.boost}")

    def __call__(self, ctx: Context) -> Tensor:
        return teachers.prefix_share(ctx.advantages, ctx.mask, self.boost)


@dataclass(frozen=True)
class EvidenceRatio(Weight):
    """``(1−l) + l·clip(e^(sign(A)·g), 1−width, 1+width)``, g = log q − log π_old: how far the teacher agrees with the
    reward's verdict; the direction stays the reward's. 1 on rows without a hint.

    Source: RLSD, arXiv:2604.03128 (width .2; l from .5 to 0 within 50 steps: ``--schedule``).
    """

    width: float = 0.2
    share: float = 0.5

    _needs = frozenset({"logp_old", "logp_teacher"})

    def check(self) -> None:
        self.refuse(0 < self.width < 1, f"width must lie in (0, 1), got {self.width}")
        self.refuse(0 <= self.share <= 1, f"share must lie in [0, 1], got {self.share}")

    def __call__(self, ctx: Context) -> Tensor:
        gap = ratios.saturate(ctx.read("logp_teacher") - ctx.read("logp_old").detach())
        evidence = (ctx.advantages.sign() * gap).exp().clamp(1 - self.width, 1 + self.width)
        return torch.where(ctx.hinted.unsqueeze(-1), 1 - self.share + self.share * evidence, torch.ones_like(evidence))


@dataclass(frozen=True)
class FallMask(Weight):
    """0 where the token's probability fell by more than ``drop`` since it was sampled: π_θ − μ < −drop; else 1.

    Source: prime-rl (drop .2); dropped tokens stay in its denominator.
    """

    drop: float = 0.2

    _needs = frozenset({"logp", "logp_sampler"})
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(0 < self.drop < 1, f"drop is a difference of probabilities in (0, 1), got {self.drop}")

    def __call__(self, ctx: Context) -> Tensor:
        fall = ctx.logp.detach().clamp(max=0.0).exp() - ctx.read("logp_sampler").detach().clamp(max=0.0).exp()
        return (fall >= -self.drop) & ctx.mask


@dataclass(frozen=True)
class LeastLikely(Weight):
    """1 on the ⌊share·n⌋ (at least one) of the minibatch's n tokens with the lowest log π_old, 0 on the others.

    Tokens tied at the cut are all taken. Source: OPSA, arXiv:2608.31046, whose code cuts within one worker.
    """

    share: float = 0.2

    _needs = frozenset({"logp_old"})
    _scope = Scope.BATCH

    def check(self) -> None:
        self.refuse(0 < self.share <= 1, f"share must lie in (0, 1], got {self.share}")

    def __call__(self, ctx: Context) -> Tensor:
        return teachers.least_likely(ctx.read("logp_old").detach(), ctx.mask, self.share)


@dataclass(frozen=True)
class OriginShare(Weight):
    """Rows weighed by who wrote them, so that a mean over responses becomes ``own``·(mean over the policy's own) +
    (1 − own)·(mean over the others'): two means, not one pooled. An origin without rows adds 0.

    ``rollouts.origin`` 0 is the policy's own. With `SequenceMean` only. Source: GKD's lambda, arXiv:2306.13649, as two
    expectations; TRL tosses one coin per step instead.
    """

    own: float = 0.5

    _needs = frozenset({"origin"})
    _scope = Scope.BATCH

    def check(self) -> None:
        self.refuse(0 <= self.own <= 1, f"own must lie in [0, 1], got {self.own}")

    def __call__(self, ctx: Context) -> Tensor:
        like = ctx.unit_mask(ctx.rewards.dtype)
        mine = (ctx.read("origin") == 0) & ctx.selected
        others = ~mine & ctx.selected
        n, n_mine, n_others = (masked.count(rows, like) for rows in (ctx.selected, mine, others))
        w = torch.where(mine, self.own * masked.divide(n, n_mine), (1 - self.own) * masked.divide(n, n_others))
        return w.unsqueeze(-1).expand_as(like)
