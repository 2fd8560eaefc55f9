"""Corrections for the gap between trainer and engine (rho = pi_old/mu), wider clips, and the REINFORCE family."""

from __future__ import annotations

import math

from .batch import (
    SATURATION,
    Batch,
    centred,
    clipped,
    leave_one_out,
    saturate,
    sequence_mean,
    sequence_sum,
    token_mean,
    whiten_over_tokens,
    z_score,
)
from .grpo_family import k3
from .scalar import clamp, minimum, stop
from .trust_region import binary_kl


def corrections(y, level: str = "token") -> list[float]:
    """rho of each token, or of the whole response (the product, its logarithm saturated) on each token."""
    rho = y.corrections()
    if level == "token" or not rho:
        return rho
    total = math.fsum(math.log(x) for x in rho)
    return [math.exp(min(max(total, -SATURATION), SATURATION))] * y.n


def weighted_clip(batch, A, W, low, high, average):
    """-average of w min( r A, clip(r) A )."""
    J = []
    for y, a, row in zip(batch, A, W, strict=True):
        J.append([w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)])
    return batch.result(-average(batch, J), A, W)


def tis(case, cap=2.0, level="token", low=0.2, high=0.2, eps=1e-6):
    """Truncated importance sampling (Yao et al.): J = sum_it min(rho, cap) min( r A, clip(r) A ) / sum_i n_i."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = [[min(rho, cap) for rho in corrections(y, level)] for y in batch]
    return weighted_clip(batch, A, W, low, high, token_mean)


def in_band(rho: float, floor: float, cap: float) -> float:
    """rho inside [floor, cap], bounds included, 0 outside."""
    return rho if floor <= rho <= cap else 0.0


def mis(case, floor=0.5, cap=2.0, level="token", low=0.2, high=0.2, eps=1e-6):
    """Masked importance sampling: the weight is rho inside [floor, cap] and 0 outside; masked tokens stay counted."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = [[in_band(rho, floor, cap) for rho in corrections(y, level)] for y in batch]
    return weighted_clip(batch, A, W, low, high, token_mean)


def icepop(case, floor=0.5, cap=5.0, low=0.2, high=0.2, eps=1e-6):
    """IcePop, arXiv 2510.18855: MIS's weight with [.5, 5], response mean, then mean."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = [[in_band(rho, floor, cap) for rho in y.corrections()] for y in batch]
    return weighted_clip(batch, A, W, low, high, sequence_mean)


def online_icepop(case, **numbers):
    """Online IcePop: IcePop with one update per batch (pi_old is the current policy, r = 1). A schedule, not a loss."""
    return icepop(case, **numbers)


def kpop(case, threshold=0.05, keep_rho=False, low=0.2, high=0.2, eps=1e-6):
    """KPop, arXiv 2606.15079: IcePop's objective with weight 1 where KL(p||q) and KL(q||p) of the event "this token"
    are both within the threshold, p = pi_old, q = mu; else 0. `keep_rho`: the weight there is rho. The threshold is
    ours (none is published)."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = []
    for y in batch:
        row = []
        for old, mu, rho in zip(y.old, y.take("logp_sampler"), y.corrections(), strict=True):
            p, q = math.exp(old), math.exp(mu)
            near = binary_kl(p, q) <= threshold and binary_kl(q, p) <= threshold
            row.append((rho if keep_rho else 1.0) if near else 0.0)
        W.append(row)
    return weighted_clip(batch, A, W, low, high, sequence_mean)


def preserving_clip(r, A: float, low: float, high: float):
    """min( r A, clip(r, (1-low) r/sg[r], (1+high) r/sg[r]) A ): beyond a bound the value is the bound's, and the
    gradient the one a ratio held at the bound would have."""
    unit = r / stop(r)
    bounded = r
    if stop(r) > 1 + high:
        bounded = (1 + high) * unit
    elif stop(r) < 1 - low:
        bounded = (1 - low) * unit
    return minimum(r * A, bounded * A)


def gppo(case, low=0.2, high=0.28, eps=1e-6):
    """GPPO (gradient-preserving), arXiv 2508.07629: token mean of `preserving_clip`. No dual clip."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [[preserving_clip(r, a, low, high) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-token_mean(batch, J), A)


def chi_square_bounds(logp_old: float, delta: float, floor: float, cap: float) -> tuple[float, float]:
    """[max(1 - e, floor), min(1 + e, cap)] with e = sqrt(delta / pi_old): each token may spend the same chi-square."""
    e = math.sqrt(delta) * math.exp(min(-logp_old / 2, 300.0))
    return max(1 - e, floor), min(1 + e, cap)


def ripo(case, delta=0.05, floor=0.5, cap=10.0, eps=1e-6):
    """RIPO, arXiv 2607.10169: token mean of min( r A, clip(r, bounds of its own pi_old) A )."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        bounds = [chi_square_bounds(old, delta, floor, cap) for old in y.old]
        J.append([minimum(r * a, clamp(r, *b) * a) for r, b in zip(y.ratios(), bounds, strict=True)])
    return batch.result(-token_mean(batch, J), A)


def rloo(case):
    """RLOO, arXiv 2402.14740: J = (1/N) sum_i (R_i - mean of the others) log pi_theta(y_i). No ratio, no clip."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, leave_one_out)
    J = [[a * lp for lp in y.logp] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_sum(batch, J), A)


def sft(case):
    """Cross-entropy: J = (1/N) sum_t log pi_theta(y_t) over the N trained tokens; rewards play no part."""
    batch = Batch(case)
    J = [list(y.logp) for y in batch]
    return batch.result(-token_mean(batch, J), [1.0] * len(batch.rewards))


def reinforce_pp(case, low=0.2, high=0.2, eps=1e-8):
    """REINFORCE++, arXiv 2501.03262: the outcome on every token, whitened over all trained tokens; clip, token mean."""
    batch = Batch(case)
    A = whiten_over_tokens(batch, batch.rewards, eps)
    J = [[clipped(r, a, low, high) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-token_mean(batch, J), A)


KL = {"k2": lambda logp, ref: saturate(ref - logp) * saturate(ref - logp) / 2, "k3": k3}


def reinforce_pp_baseline(case, low=0.2, high=0.2, beta=0.0, estimator="k2", eps=1e-8):
    """REINFORCE++-baseline: R - mean of the group, then whitened likewise; optionally beta KL to the reference as a
    token loss, k2 or k3 of log pi_ref - log pi_theta."""
    batch = Batch(case)
    A = whiten_over_tokens(batch, batch.by_group(batch.rewards, centred), eps)
    J = [[clipped(r, a, low, high) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    if beta:
        for row, y in zip(J, batch, strict=True):
            penalty = [KL[estimator](lp, ref) for lp, ref in zip(y.logp, y.take("logp_ref"), strict=True)]
            row[:] = [j - beta * k for j, k in zip(row, penalty, strict=True)]
    return batch.result(-token_mean(batch, J), A)
