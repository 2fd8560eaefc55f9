"""Weights that decide which tokens or responses to trust: detached masks on the policy's own drift or on the sample."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import LongResponseWarning
from kenpo.ops import divergences, masked, trust
from kenpo.stages.base import Scope, Weight
from kenpo.stages.context import Context
from kenpo.stages.ratios import Anchor

#: Tokens from which on the max criterion alone is known to reject nearly everything (ours; the source says "long").
_LONG = 4096


@dataclass(frozen=True)
class Untruncated(Weight):
    """0 on every token of a response that hit the length limit ("overlong filtering"), 1 elsewhere.

    Set the aggregate's ``over="kept"`` as well, so that the dropped tokens also leave the denominator. The reward of a
    truncated response still enters its group's mean and spread; `DropTruncated` takes it out of them.
    Source: DAPO, arXiv:2503.14476, section 3.4.
    """

    _needs = frozenset({"truncated"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        return ~ctx.read("truncated").unsqueeze(-1) & ctx.mask


@dataclass(frozen=True)
class DivergenceMask(Weight):
    """0 where the update would move a token further out and its divergence from the anchor already exceeds `threshold`.

    Outward: A > 0 and r > 1, or A < 0 and r < 1. The divergence D(anchor‖π_θ) is of two events ("this token", the rest)
    or, with ``buckets="top_k"``, of the sampler's K likeliest tokens with the sampled one, and the rest
    (rollouts.tokens, topk_ids, topk_logp_sampler and policy.topk_logp). ``kind``: "tv" total variation, "kl". D equal
    to the threshold is kept; tokens that come back are never masked. ``beyond="scale"``: threshold/D there in place of
    0, so that a far token pulls less, not never (ours; only the mask is published). Source: DPPO, arXiv:2602.04879,
    eq. 12-16.
    """

    kind: Literal["tv", "kl"] = "tv"
    threshold: float = 0.15
    buckets: Literal["binary", "top_k"] = "binary"
    anchor: Anchor = "sampler"
    beyond: Literal["mask", "scale"] = "mask"

    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.threshold >= 0, f"threshold must not be negative, got {self.threshold}")
        self.refuse(
            self.beyond == "mask" or self.threshold > 0,
            "a threshold of 0 scales every outward token to 0: beyond='mask'",
        )
        self.refuse(
            self.buckets == "binary" or self.anchor == "sampler",
            "top-K buckets are the sampler's: set anchor='sampler'",
        )

    @property
    def needs(self) -> frozenset[str]:
        more = {"tokens", "topk_ids", "topk_logp_sampler", "topk_logp"} if self.buckets == "top_k" else set()
        return super().needs | {"logp"} | more

    def __call__(self, ctx: Context) -> Tensor:
        divergence = self._divergence(ctx)
        outward = trust.outward(ctx.log_ratio(self.anchor), ctx.advantages)
        if self.beyond == "scale":
            scale = self.threshold / divergence.clamp(min=self.threshold)
            return torch.where(outward, scale, torch.ones_like(scale))
        return ~((divergence > self.threshold) & outward)

    def _divergence(self, ctx: Context) -> Tensor:
        mu, pi = ctx.read(f"logp_{self.anchor}").detach(), ctx.logp.detach()
        if self.buckets == "binary":
            return divergences.binary_tv(mu, pi) if self.kind == "tv" else divergences.binary_kl(mu, pi)
        ids = ctx.read("topk_ids")
        absent = ~(ids == ctx.read("tokens").unsqueeze(-1)).any(-1, keepdim=True)
        valid = torch.cat([ids >= 0, absent], -1)
        p = torch.cat([ctx.read("topk_logp_sampler"), mu.unsqueeze(-1)], -1)
        q = torch.cat([ctx.read("topk_logp").detach(), pi.unsqueeze(-1)], -1)
        return divergences.bucket_divergence(p, q, valid, self.kind)


@dataclass(frozen=True)
class SequenceKLMask(Weight):
    """A response is trusted whole if no token's divergence from μ exceeds ``max`` and their mean does not exceed
    ``mean``; else all its tokens get 0. None switches a criterion off.

    ``estimator="sampled"``: with x = log π_θ/μ, the largest k2 = x²/2 (symmetric, so it sees both directions) and the
    mean k3 = e^x − 1 − x; detectors, not bounds. "exact": both on the full-vocabulary KL(μ‖π_θ) in policy.kl_sampler,
    the only form to which the paper's theorem applies. An empty response is trusted. Responses beyond 4096 tokens
    without ``mean`` are warned about once: the longer, the surer one token fails the max criterion.
    Source: TRM, arXiv:2512.23075; the choice of sampled estimators is that of slime and of the authors' blog.
    """

    max: float | None = 0.05
    mean: float | None = None
    estimator: Literal["sampled", "exact"] = "sampled"

    _scope = Scope.SEQUENCE
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.max is not None or self.mean is not None, "set max or mean, or drop the stage")
        for name in ("max", "mean"):
            limit = getattr(self, name)
            self.refuse(limit is None or limit >= 0, f"{name} must not be negative, got {limit}")

    @property
    def anchor(self) -> str | None:
        """The policy that is compared with, where log-ratios are."""
        return "sampler" if self.estimator == "sampled" else None

    @property
    def distance(self) -> tuple[str, str]:
        return "policy", "sampler"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "logp_sampler"} if self.estimator == "sampled" else {"kl_sampler"})

    def __call__(self, ctx: Context) -> Tensor:
        if self.estimator == "exact":
            largest = average = ctx.read("kl_sampler").detach()
        else:
            x = ctx.log_ratio("sampler").detach()
            largest, average = divergences.k2(x), divergences.k3(x)
        keep = ctx.mask.new_ones(len(ctx.mask))
        if self.mean is None and ctx.mask.shape[-1] > _LONG and bool((ctx.lengths > _LONG).any()):
            warnings.warn(
                f"sequence_kl_mask: responses of more than {_LONG} tokens are judged by their worst token alone; add "
                "the average criterion, e.g. --set weights.sequence_kl_mask.mean=0.001",
                LongResponseWarning,
                stacklevel=2,
            )
        if self.max is not None:
            keep = keep & ~(ctx.mask & (largest > self.max)).any(-1)
        if self.mean is not None:
            keep = keep & (masked.row_mean(average, ctx.mask) <= self.mean)
        return keep.unsqueeze(-1) & ctx.mask


@dataclass(frozen=True)
class RatioGate(Weight):
    """PPO's clip as a mask: 0 if A > 0 and r > 1 + high, or A < 0 and r < 1 − low; else 1. r = π_θ/anchor.

    ``low`` and ``high`` are distances from 1. Source: MiniRL, arXiv:2512.01374 (0.2 and 0.27).
    """

    low: float = 0.2
    high: float = 0.27
    anchor: Anchor = "old"

    _needs = frozenset({"logp"})

    def check(self) -> None:
        self.refuse(self.low >= 0 and self.high >= 0, f"low and high are distances ≥ 0, got {self.low}, {self.high}")

    def __call__(self, ctx: Context) -> Tensor:
        r, a = ctx.log_ratio(self.anchor).detach().exp(), ctx.advantages
        return ~(((a > 0) & (r > 1 + self.high)) | ((a < 0) & (r < 1 - self.low)))


@dataclass(frozen=True)
class OffPolicySequences(Weight):
    """0 on every token of a response with A < 0 whose mean of log(anchor/π_θ) exceeds `delta`; 1 elsewhere (OPSM).

    `delta` must be given: TRL's example is 0.5, slime's default 1e-4, four orders of magnitude apart. Where advantages
    differ within a response their mean decides. Set the aggregate's ``over`` for the denominator.
    Source: DeepSeek-V3.2's off-policy sequence masking, as in TRL and slime.
    """

    delta: float
    anchor: Anchor = "old"

    _needs = frozenset({"logp"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        drift = -masked.row_mean(ctx.log_ratio(self.anchor).detach(), ctx.mask)
        negative = masked.row_mean(ctx.advantages, ctx.mask) < 0
        return ~(negative & (drift > self.delta)).unsqueeze(-1) & ctx.mask
