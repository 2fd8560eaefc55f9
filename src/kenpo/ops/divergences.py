"""Divergences between two policies, from the log-probs of the sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import count, mean, row_mean, row_sum, select
from kenpo.ops.ratios import saturate, sequence_log_sum


def k1(log_ratio: Tensor) -> Tensor:
    """``−log ρ`` with ρ = q/p at a sample of p: unbiased for KL(p‖q), may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """``½ log² ρ``: never negative, biased; its gradient is that of the KL on policy."""
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """``ρ − 1 − log ρ`` with ρ = q/p at a sample of p: unbiased for KL(p‖q), never negative.

    The argument saturates at ±20 in value and gradient, so the result is finite (at most e²⁰ − 21) for any finite
    input. By `expm1`, which keeps the digits near ρ = 1.
    """
    x = saturate(log_ratio)
    return x.expm1() - x


#: exp of a log-prob is held this far from 1 where its complement is needed.
_EDGE = 1e-7


def binary_tv(logp: Tensor, logq: Tensor) -> Tensor:
    """``|p − q|``: total variation of the event "this token", a lower bound of the vocabulary's."""
    return (logp.exp() - logq.exp()).abs()


def binary_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """``p log(p/q) + (1−p) log((1−p)/(1−q))``: KL(p‖q) of the event "this token", a lower bound of the vocabulary's.

    From log-probs, finite whenever they are; p and q are held at 1 − 1e-7 or below.

    >>> binary_kl(torch.tensor(0.9).log(), torch.tensor(0.6).log())
    tensor(0.2263)
    """
    return binary_kls(logp, logq)[0]


@torch.no_grad()
def binary_kls(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """`binary_kl` in both directions: (KL(p‖q), KL(q‖p)), from shared terms; constants, as all that gates is."""
    logp, logq = logp.clamp(max=-_EDGE), logq.clamp(max=-_EDGE)
    event, p, q = logp - logq, logp.exp(), logq.exp()
    minus_rest_p, minus_rest_q = logp.expm1_(), logq.expm1_()
    rest = (minus_rest_p / minus_rest_q).log_()
    forward = p.mul_(event).addcmul_(minus_rest_p, rest, value=-1)
    return forward, minus_rest_q.mul_(rest).addcmul_(q, event, value=-1)


def bucket_divergence(logp: Tensor, logq: Tensor, valid: Tensor, kind: str) -> Tensor:
    """[...,K] -> [...]: D(p‖q) over the valid buckets and one more that holds the rest of the vocabulary.

    `kind` "tv": half the L1 distance; "kl": KL(p‖q). The rest's mass is floored at 1e-12 on both sides, so that
    rounding can't make it infinite. A lower bound of the vocabulary's, tighter than the binary one.
    """
    p, q = select(logp.exp(), valid), select(logq.exp(), valid)
    rest_p, rest_q = ((1 - x.sum(-1)).clamp(min=1e-12) for x in (p, q))
    if kind == "tv":
        return ((p - q).abs().sum(-1) + (rest_p - rest_q).abs()) / 2
    return (p * select(logp - logq, valid)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())


def off_policy_statistics(log_ratio: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far the sampler is from π_old (log ρ [B,T], saturated): (per response [B], over all tokens 0-d).

    Per response: length; product, geometric mean, smallest and largest ratio; largest |log ρ|; sum and mean of k1, k2,
    k3, largest k2 and k3. Over tokens: mean k1 and k3, mean log² ρ, ``chi_square`` = mean ρ² − 1, and
    ``no_divergence_observed``: every log ρ is exactly 0, as it is when the sampler's log-probs were not recorded but
    scored again. Ratios of an empty response are 1, everything else there 0.
    """
    x = select(log_ratio, mask)
    parts = {"k1": k1(x), "k2": k2(x), "k3": k3(x)}
    filled = mask.any(-1)

    def largest(y: Tensor) -> Tensor:
        return select(y.masked_fill(~mask, -torch.inf).amax(-1), filled) if y.shape[-1] else y.sum(-1)

    rows = {
        "length": count(mask, x, -1),
        "ratio_product": sequence_log_sum(x, mask).squeeze(-1).exp(),
        "ratio_geometric": row_mean(x, mask).exp(),
        "ratio_min": (-largest(-x)).exp(),
        "ratio_max": largest(x).exp(),
        "max_abs_log_ratio": largest(x.abs()),
    }
    for name, y in parts.items():
        rows |= {f"{name}_sum": row_sum(y, mask), f"{name}_mean": row_mean(y, mask)}
    rows |= {"k2_max": largest(parts["k2"]), "k3_max": largest(parts["k3"])}
    batch = {
        "k1_mean": mean(parts["k1"], mask),
        "k3_mean": mean(parts["k3"], mask),
        "log_ratio_second_moment": mean(x * x, mask),
        "chi_square": mean((2 * x).expm1(), mask),
        "no_divergence_observed": (x == 0).all(),
    }
    return rows, batch
