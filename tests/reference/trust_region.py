"""Methods that mask or bound by divergence from the policy that sampled (mu), and other token-silencing rules.

r is pi_theta/mu unless a docstring says otherwise; masks are constants. Same interface as `grpo_family`.
"""

from __future__ import annotations

import math

from .batch import (
    Batch,
    centred,
    clipped,
    constant,
    mean,
    quantile,
    sequence_mean,
    sequence_sum,
    token_mean,
    variance,
    z_score,
)
from .grpo_family import signed_clip
from .scalar import clamp, exp, minimum, stop


def x_log_ratio(p: float, q: float) -> float:
    """p log(p/q) with 0 log 0 = 0; infinite where q = 0 < p."""
    if p <= 0.0:
        return 0.0
    return math.inf if q <= 0.0 else p * math.log(p / q)


def binary_tv(p: float, q: float) -> float:
    """Total variation of the event "this token": |p - q|."""
    return abs(p - q)


def binary_kl(p: float, q: float) -> float:
    """KL(p || q) of the event "this token": p log(p/q) + (1-p) log((1-p)/(1-q))."""
    return x_log_ratio(p, q) + x_log_ratio(1.0 - p, 1.0 - q)


def outward(A: float, log_ratio: float) -> bool:
    """The update moves this token's probability further away from where it already drifted."""
    return (A > 0 and log_ratio > 0) or (A < 0 and log_ratio < 0)


def dppo(case, threshold=0.15, divergence=binary_tv):
    """DPPO, arXiv 2602.04879 (binary total variation): J = sum_it M r A / sum_i n_i, A = R - mean.

    M = 0 where the token moves outward and D(mu || pi) > threshold, else 1. Masked tokens stay counted; no cap.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    M = []
    for y, a in zip(batch, A, strict=True):
        D = [divergence(math.exp(m), math.exp(lp.data)) for m, lp in zip(y.take("logp_sampler"), y.logp, strict=True)]
        x = [stop(d) for d in y.log_ratios("sampler")]
        M.append([0.0 if outward(a, x[t]) and D[t] > threshold else 1.0 for t in range(y.n)])
    return _masked_policy_gradient(batch, A, M, token_mean)


def _masked_policy_gradient(batch, A, M, average):
    """-average of M r A over tokens, r against the sampler."""
    J = []
    for y, a, row in zip(batch, A, M, strict=True):
        J.append([w * (r * a) if w else 0.0 for w, r in zip(row, y.ratios("sampler"), strict=True)])
    return batch.result(-average(batch, J), A, M)


def dppo_kl(case, threshold=0.05):
    """DPPO with the binary KL, directed from mu to pi."""
    return dppo(case, threshold, binary_kl)


def topk_divergence(sampler: dict, policy: dict, kind: str) -> float:
    """D(mu || pi) over buckets: the given tokens, and one bucket for the rest of the vocabulary."""
    rest = (max(0.0, 1.0 - math.fsum(sampler.values())), max(0.0, 1.0 - math.fsum(policy.values())))
    pairs = [(sampler[v], policy[v]) for v in sampler] + [rest]
    return sum(abs(p - q) for p, q in pairs) / 2 if kind == "tv" else sum(x_log_ratio(p, q) for p, q in pairs)


def dppo_topk(case, threshold=0.15, kind="tv"):
    """DPPO over the sampler's K likeliest tokens with the sampled one, and the rest (K + 1 or K + 2 buckets)."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    M = []
    for y, a in zip(batch, A, strict=True):
        ids, mu_k, pi_k, token = (y.take(n) for n in ("topk_ids", "topk_logp_sampler", "topk_logp", "tokens"))
        mu, x, row = y.take("logp_sampler"), [stop(d) for d in y.log_ratios("sampler")], []
        for t in range(y.n):
            sampler = {v: math.exp(q) for v, q in zip(ids[t], mu_k[t], strict=True) if v >= 0}
            policy = {v: math.exp(q) for v, q in zip(ids[t], pi_k[t], strict=True) if v >= 0}
            if token[t] not in sampler:
                sampler[token[t]], policy[token[t]] = math.exp(mu[t]), math.exp(y.logp[t].data)
            far = topk_divergence(sampler, policy, kind) > threshold
            row.append(0.0 if outward(a, x[t]) and far else 1.0)
        M.append(row)
    return _masked_policy_gradient(batch, A, M, token_mean)


def k2_of(x: float) -> float:
    """x^2 / 2, x = log(pi/mu): symmetric."""
    return x * x / 2


def k3_of(x: float) -> float:
    """e^x - 1 - x, x = log(pi/mu): under mu unbiased for KL(mu || pi)."""
    return math.exp(x) - 1 - x


def trm(case, max=0.05, mean=None, over="all", eps=1e-6):
    """TRM, arXiv 2512.23075: J = (1/N) sum_i M_i A_i sum_t r_it. A response is dropped whole when its largest k2
    exceeds `max`, or (if given) its mean k3 exceeds `mean`; dropped ones stay in N, or leave it (`over="kept"`, as do
    responses without a trained token). Our reading: sampled estimators."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    M = []
    for y in batch:
        x = [stop(d) for d in y.log_ratios("sampler")]
        keep = y.n == 0 or (
            (max is None or all(k2_of(v) <= max for v in x))
            and (mean is None or math.fsum(k3_of(v) for v in x) / y.n <= mean)
        )
        M.append([float(keep)] * y.n)
    if over == "kept":
        kept = sum(1 for row in M if any(row))
        return _masked_policy_gradient(batch, A, M, lambda _, J: sum(map(sum, J)) / kept if kept else 0.0)
    return _masked_policy_gradient(batch, A, M, sequence_sum)


def prefix_min(ratios: list[float], inclusive: bool = False) -> list[float]:
    """The smallest ratio among the strictly earlier tokens (1 for the first), or including the token's own."""
    return [min(ratios[: t + 1]) if inclusive else min(ratios[:t], default=1.0) for t in range(len(ratios))]


def minpro(case, floor=0.8, cap=1.28, inclusive=False, eps=1e-6):
    """MinPRO, arXiv 2601.22718: J = sum_it sg[clip(u_t r_t, floor, cap)] A log pi_theta / sum_i n_i,
    u_t = min over earlier tokens of r. The bounds are ours. `inclusive`: the weight is the min up to t."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        r = [stop(x) for x in y.ratios("sampler")]
        u = prefix_min(r, inclusive)
        w = u if inclusive else [ut * rt for ut, rt in zip(u, r, strict=True)]
        J.append([clamp(wt, floor, cap) * a * lp for wt, lp in zip(w, y.logp, strict=True)])
    return batch.result(-token_mean(batch, J), A)


def minpro_inclusive(case, floor=0.8, cap=1.28):
    """MinPRO's inclusive form: the inclusive prefix minimum stands in for the ratio."""
    return minpro(case, floor, cap, inclusive=True)


def second_moment_cut(squares: list[float], budget: float) -> float:
    """The largest (log r)^2 that may stay: drop from the top, ties together, until the mean is within budget."""
    left = sorted(squares)
    while left and math.fsum(left) / len(left) > budget:
        left = [v for v in left if v < left[-1]]
    return left[-1] if left else -1.0


def m2po(case, budget=0.04, eps=1e-6):
    """M2PO, arXiv 2510.01161: J = sum_it M r A / sum_i n_i. Among the batch's outward tokens those of largest
    (log r)^2 are masked until the mean over the others is at most `budget`. Inward tokens are never masked."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    X = [[stop(d) for d in y.log_ratios("sampler")] for y in batch]
    cut = second_moment_cut([x * x for a, row in zip(A, X, strict=True) for x in row if outward(a, x)], budget)
    M = [[0.0 if outward(a, x) and x * x > cut else 1.0 for x in row] for a, row in zip(A, X, strict=True)]
    return _masked_policy_gradient(batch, A, M, token_mean)


def m2po_code_range(squares: list[float], budget: float) -> tuple[float, float, float]:
    """(low, high, mean after capping) of the released code: the previous sorted (log r)^2 before the point where
    sum min(v, cap) reaches budget * count becomes the cap; within budget there is no clip (1.0, 99999)."""
    v = sorted(squares)
    if not v or mean(v) <= budget:
        return 1.0, 99999.0, mean(v) if v else 0.0
    total = budget * len(v)
    for k in range(len(v)):
        if math.fsum(v[:k]) + v[k] * (len(v) - k) >= total:
            cap = v[k - 1] if k else v[0]
            break
    tau = math.sqrt(cap)
    return 1 - math.exp(-tau), math.exp(tau) - 1, mean([min(x, cap) for x in v])


def m2po_code(case, budget=0.04, eps=1e-6):
    """M2PO as its release computes it: PPO's min-clip with a range found from the batch's outward tokens, no mask."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    X = [[stop(d) for d in y.log_ratios("sampler")] for y in batch]
    low, high, _ = m2po_code_range([x * x for a, row in zip(A, X, strict=True) for x in row if outward(a, x)], budget)
    # The range ends at some token's own ratio: that token is inside, whatever the exponential rounds to.
    low, high = low + 1e-12, high * (1 + 1e-12)
    J = [[clipped(r, a, low, high) for r in y.ratios("sampler")] for y, a in zip(batch, A, strict=True)]
    return batch.result(-token_mean(batch, J), A)


def root_z_score(eps: float):
    """(R - mean) / sqrt(var + eps) with the population variance."""

    def rule(group, k):
        return 0.0 if constant(group) else (group[k] - mean(group)) / math.sqrt(variance(group, 0) + eps)

    return rule


def centred_clip(r, anchor: float, A: float, radius: float, floor: float):
    """min( r A, clip(r, max(anchor - radius, floor), anchor + radius) A ): centred on pi_old/mu, not on 1."""
    return minimum(r * A, clamp(r, max(anchor - radius, floor), anchor + radius) * A)


def off_policy_grpo(case, radius=0.2, floor=0.0, eps=1e-4):
    """Off-policy GRPO, arXiv 2505.22257: response mean, then mean, of the centred clip; eps inside the root. Uniform
    groups contribute 0 and stay in N. No KL."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, root_z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        pairs = zip(y.ratios("sampler"), y.corrections(), strict=True)
        J.append([centred_clip(r, anchor, a, radius, floor) for r, anchor in pairs])
    return batch.result(-sequence_mean(batch, J), A)


def spurious(p: list[float], H: list[float], A: list[float], probability: float, q: float, scope: str = "conditional"):
    """(candidates, threshold, keep) over a batch's tokens: rare and confident tokens of good responses are silenced.

    Candidates have A > 0 and p < probability; of these are silenced those with entropy strictly below the q-quantile
    over the candidates ("conditional") or over all tokens ("batch"). No candidate: nothing is silenced.
    """
    candidates = [a > 0 and x < probability for a, x in zip(A, p, strict=True)]
    pool = [h for h, c in zip(H, candidates, strict=True) if c or scope == "batch"]
    if not any(candidates):
        return candidates, None, [1.0] * len(p)
    threshold = quantile(pool, q)
    return candidates, threshold, [0.0 if c and h < threshold else 1.0 for c, h in zip(candidates, H, strict=True)]


def stapo(case, low=0.2, high=0.28, probability=0.002, quantile=0.75, scope="conditional", eps=1e-6):
    """STAPO, arXiv 2602.15620: J = sum_it I min( r A, clip(r) A ) / sum_it I, r = pi_theta/pi_old. I = 0 on spurious
    tokens, judged by the current policy's probability and entropy; the denominator counts survivors."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    p = [math.exp(lp.data) for y in batch for lp in y.logp]
    H = [h for y in batch for h in y.take("entropy")]
    a_of_token = [a for y, a in zip(batch, A, strict=True) for _ in range(y.n)]
    flat = iter(spurious(p, H, a_of_token, probability, quantile, scope)[2])
    keep = [[next(flat) for _ in range(y.n)] for y in batch]
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, keep, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(sum(row) for row in keep)), A, keep)


def mini_rl(case, low=0.2, high=0.27, cap=5.0):
    """MiniRL, arXiv 2512.01374: J = (1/N) sum_i sum_t G sg[min(pi_theta/mu, cap)] A log pi_theta, A = R - mean.

    G = 0 if A > 0 and pi_theta/pi_old > 1+high, or A < 0 and pi_theta/pi_old < 1-low; else 1.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    G, J = [], []
    for y, a in zip(batch, A, strict=True):
        r = [stop(x) for x in y.ratios()]
        gate = [0.0 if (a > 0 and x > 1 + high) or (a < 0 and x < 1 - low) else 1.0 for x in r]
        w = [min(stop(x), cap) for x in y.ratios("sampler")]
        G.append(gate)
        J.append([gate[t] * w[t] * a * y.logp[t] if gate[t] else 0.0 for t in range(y.n)])
    return batch.result(-sequence_sum(batch, J), A, G)


# ---- router shift ---------------------------------------------------------------------------------------------------


def router_shift(old: list[list[float]], new: list[list[float]], floor: float, layers: str = "geometric") -> float:
    """gamma of one token from the log-scores [layers][experts] of the experts active under the old router, floored.

    geometric: exp(-mean over layers of mean_k |dlog p|); product: the sum over layers; fork_*: per layer the mean over
    k of exp(-|dlog p|), then the geometric mean or the product over layers.
    """
    shift = [[abs(b - a) for a, b in zip(x, y, strict=True)] for x, y in zip(old, new, strict=True)]
    if layers.startswith("fork"):
        logs = [math.log(mean([math.exp(-s) for s in row])) for row in shift]
    else:
        logs = [-mean(row) for row in shift]
    total = math.fsum(logs)
    return max(math.exp(total / len(logs) if layers.endswith("geometric") else total), floor)


def rspo(case, bound=0.4, floor=0.8, layers="geometric", eps=1e-6):
    """RSPO (router shift), arXiv 2510.23027: J = (1/N) sum_i A_i exp( mean_t (dc + log gamma) ), GMPO with drift.

    gamma is detached, applied after the log-clip, and outside the sign power (it never amplifies). The floor is ours.
    """
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        if y.n:
            gamma = gammas(y, floor, layers)
            dc = [signed_clip(d, a, bound, bound) for d in y.log_ratios()]
            J.append(a * exp(sum(d + math.log(g) for d, g in zip(dc, gamma, strict=True)) / y.n))
    return batch.result(-sum(J) / max(batch.N, 1), A)


def gammas(y, floor: float, layers: str) -> list[float]:
    """The drift weight of each token of a response."""
    pairs = zip(y.take("router_logp_old"), y.take("router_logp"), strict=True)
    return [router_shift(old, new, floor, layers) for old, new in pairs]


def rspo_pre_clip(case, low=0.2, high=0.2, floor=0.8, layers="geometric", eps=1e-6):
    """RSPO before the clip: gamma r takes the place of r in the token clip; response mean, then mean."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        J.append([clipped(g * r, a, low, high) for g, r in zip(gammas(y, floor, layers), y.ratios(), strict=True)])
    return batch.result(-sequence_mean(batch, J), A)


def rspo_post_clip(case, low=0.2, high=0.2, floor=0.8, layers="geometric", eps=1e-6):
    """RSPO with gamma as a weight on the clipped token surrogate; response mean, then mean."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [gammas(y, floor, layers) for y in batch]
    J = [
        [g * clipped(r, a, low, high) for g, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-sequence_mean(batch, J), A, W)
