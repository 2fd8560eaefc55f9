"""GRPO and the methods that change its ratio, its clip or its average (per-token ratios, no sampler).

Each function takes a case and the method's numbers and gives (loss, coefficients, advantages, weights). J is the
papers' objective, to be maximised; the loss is -J. r is pi_theta/pi_old per token, n_i counts trained tokens.
"""

from __future__ import annotations

from .batch import (
    Batch,
    centred,
    clipped,
    constant,
    dual_clipped,
    mean,
    saturate,
    sequence_mean,
    sequence_sum,
    token_mean,
    z_score,
)
from .scalar import clamp, exp, expm1, log, log1p, minimum, sigmoid, softplus, stop


def k3(logp, ref):
    """exp(d) - d - 1 with d = log pi_ref - log pi_theta, saturated."""
    d = saturate(ref - logp)
    return exp(d) - d - 1


def grpo(case, low=0.2, high=0.2, beta=0.04, dual=None, eps=1e-6):
    """DeepSeekMath, arXiv 2402.03300.

    J = (1/N) sum_i (1/n_i) sum_t { min( r A, clip(r, 1-low, 1+high) A ) - beta k3 }, A = (R - mean)/(std + eps) in the
    group. The KL term acts on every token, also where A = 0. Ours: std with ddof 1, eps added to it.
    `dual`: verl's dual clip, where A < 0 the objective is never below dual A.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [[dual_clipped(r, a, low, high, dual) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    if beta:
        for row, y in zip(J, batch, strict=True):
            row[:] = [j - beta * k3(lp, ref) for j, lp, ref in zip(row, y.logp, y.take("logp_ref"), strict=True)]
    return batch.result(-sequence_mean(batch, J), A)


def overlong_penalty(n: int, limit: int | None, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to limit - buffer, falling linearly to -1 at the limit."""
    if limit is None or n <= limit - buffer:
        return 0.0
    return max(((limit - buffer) - n) / buffer, -1.0)


def dapo(case, low=0.2, high=0.28, limit=None, buffer=4096, average=token_mean, eps=1e-6):
    """DAPO, arXiv 2503.14476.

    J = sum_it min( r A, clip(r, 1-low, 1+high) A ) / sum_i n_i, over groups that are neither all right nor all wrong.
    Uniform means: all raw outcomes equal (before the length penalty); a group of one is uniform. Our reading: the token
    mean is over the whole batch; `average=group_token_mean` takes it per prompt, as the paper writes.
    """
    batch = Batch(case, keep=lambda group, y: not constant([z.reward for z in group]))
    A = batch.by_group([y.reward + overlong_penalty(y.n, limit, buffer) for y in batch], z_score(eps))
    J = [[clipped(r, a, low, high) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-average(batch, J), A)


def dr_grpo(case, low=0.2, high=0.2, length=None):
    """Dr. GRPO, arXiv 2503.20783: A = R - mean, and J = sum_it min(...) / (N * length) with a constant length."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    J = [[clipped(r, a, low, high) / length for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_sum(batch, J), A)


def sequence_ratio(y):
    """GSPO's s = (pi_theta(y)/pi_old(y))^(1/n), from saturated token log-ratios. Only for n > 0."""
    return exp(sum(y.log_ratios()) / y.n)


def gspo(case, low=3e-4, high=4e-4, eps=1e-6):
    """GSPO, arXiv 2507.18071: J = (1/N) sum_i min( s_i A_i, clip(s_i, 1-low, 1+high) A_i )."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [clipped(sequence_ratio(y), a, low, high) for y, a in zip(batch, A, strict=True) if y.n]
    return batch.result(-sum(J) / max(batch.N, 1), A)


def gspo_token(case, low=3e-4, high=4e-4, eps=1e-6):
    """GSPO-token, same paper: s_it = sg[s_i] pi(y_it)/sg[pi(y_it)], J = (1/N) sum_i (1/n_i) sum_t min(...)."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [[clipped(s, a, low, high) for s in gspo_token_ratios(y)] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_mean(batch, J), A)


def gspo_token_ratios(y):
    """sg[s] * pi/sg[pi] per token. Past saturation of its own log-ratio a token has no gradient, as elsewhere."""
    if not y.n:
        return []
    d = y.log_ratios()
    s = stop(sequence_ratio(y))
    return [s * exp(x - stop(x)) for x in d]


def luspo(case, low=2e-3, high=2.5e-3, eps=1e-6):
    """LUSPO, arXiv 2602.05261: GSPO's term of a response times its length, J = (1/N) sum_i n_i min( s_i A_i, ... )."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [y.n * clipped(sequence_ratio(y), a, low, high) for y, a in zip(batch, A, strict=True) if y.n]
    return batch.result(-sum(J) / max(batch.N, 1), A)


def signed_clip(d, A: float, low: float, high: float):
    """GMPO's one-sided clip of a log-ratio: capped at +high if A > 0, floored at -low if A < 0."""
    if A > 0:
        return clamp(d, float("-inf"), high)
    return clamp(d, -low, float("inf")) if A < 0 else d


def gmpo(case, low=0.4, high=0.4, literal=False, eps=1e-6):
    """GMPO, arXiv 2507.20673: J = (1/N) sum_i A_i exp( (1/n_i) sum_t dc_it ).

    dc is the log-ratio clipped on the side A pushes to. Where paper and frameworks differ (low != high) the floor for
    A < 0 is exp(-low), as in verl and TRL; `literal`: the paper's, exp(-high).
    """
    low = high if literal else low
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        if y.n:
            J.append(a * exp(sum(signed_clip(d, a, low, high) for d in y.log_ratios()) / y.n))
    return batch.result(-sum(J) / max(batch.N, 1), A)


def power_mean(dc: list, p: float):
    """( mean_t exp(p dc) )^(1/p); p = 0 is the geometric mean."""
    if abs(p) < 1e-12:
        return exp(sum(dc) / len(dc))
    return exp(log1p(sum(expm1(p * d) for d in dc) / len(dc)) / p)


def effective_size(dc: list[float], p: float) -> float:
    """ESS(p) = (sum_t rc^p)^2 / sum_t rc^(2p), rc = exp(dc): n at p = 0, falling in p."""
    return sum(stop(exp(p * d)) for d in dc) ** 2 / sum(stop(exp(2 * p * d)) for d in dc)


def ess_exponent(dc: list[float], f: float) -> float:
    """p in [0, 1] with ESS(p) = (1-f) ESS(1) + f n. All ratios equal: p = 1 (the mean doesn't depend on it).
    Nothing clipped: p = 1, exactly (far ratios make ESS too flat there for a search)."""
    if constant(dc) or f == 0:
        return 1.0
    target = (1 - f) * effective_size(dc, 1.0) + f * len(dc)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if effective_size(dc, middle) > target else (low, middle)
    return (low + high) / 2


def pmpo(case, low=0.4, high=0.4, p="ess", eps=1e-6):
    """PMPO, arXiv 2601.22521, our reading: J = (1/N) sum_i A_i (mean_t rc^p_i)^(1/p_i), rc as GMPO's clipped ratio.

    p_i is detached and chosen per response: the fraction f_i of clipped tokens sets a target effective sample size
    (1-f_i) ESS(1) + f_i n_i. The paper's map from f to the target isn't public. A number for `p` fixes it.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        if y.n and a:
            d = y.log_ratios()
            dc = [signed_clip(x, a, low, high) for x in d]
            f = mean([float(stop(c) != stop(x)) for c, x in zip(dc, d, strict=True)])
            exponent = ess_exponent([stop(c) for c in dc], f) if p == "ess" else p
            J.append(a * power_mean(dc, exponent))
    return batch.result(-sum(J) / max(batch.N, 1), A)


def sapo(case, tau_pos=1.0, tau_neg=1.05, eps=1e-6):
    """SAPO, arXiv 2511.20347: J = (1/N) sum_i (1/n_i) sum_t A (4/tau) sigmoid(tau (r-1)), tau by the sign of A."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        tau = tau_pos if a > 0 else tau_neg
        J.append([a * (4 / tau) * sigmoid(tau * (r - 1)) for r in y.ratios()])
    return batch.result(-sequence_mean(batch, J), A)


def sspo(case, tau_pos=1.0, tau_neg=1.05, eps=1e-6):
    """SSPO, arXiv 2602.19327 (v1 form): J = (1/N) sum_i A_i ( prod_t f(r_it) )^(1/n_i), f as in SAPO.

    Computed as exp( mean_t log f ), log f = log(4/tau) - softplus(-tau (r-1)).
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        tau = tau_pos if a > 0 else tau_neg
        if y.n:
            J.append(a * exp(sum(log(4 / tau) - softplus(-tau * (r - 1)) for r in y.ratios()) / y.n))
    return batch.result(-sum(J) / max(batch.N, 1), A)


def cispo(case, floor=None, cap=5.0, average=token_mean, eps=1e-6):
    """CISPO, arXiv 2506.13585: J = sum_it sg[clip(r, floor, cap)] A log pi_theta / sum_i n_i. Bounds are absolute; no
    floor. The paper gives no cap: 5 is ours. The value isn't a metric, it depends on absolute log-probs."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    low = float("-inf") if floor is None else floor
    J = [
        [clamp(stop(r), low, cap) * a * lp for r, lp in zip(y.ratios(), y.logp, strict=True)]
        for y, a in zip(batch, A, strict=True)
    ]
    return batch.result(-average(batch, J), A)


def entropy_mix(H: list[float]) -> list[float]:
    """DHPO's other weight: entropy min-max normalised within the response; .5 where it is flat."""
    spread = max(H) - min(H) if H else 0.0
    return [(h - min(H)) / spread if spread else 0.5 for h in H]


def dhpo(case, weight=0.5, token_low=0.2, token_high=0.2, sequence_low=3e-4, sequence_high=4e-4, plain=False, eps=1e-6):
    """DHPO, arXiv 2601.05607, our reading: m = w r + (1-w) s, mc = w clip(r) + (1-w) clip(s), J = min( m A, mc A ),
    response mean, then mean. w is a number or "entropy" (on the token branch, detached). s is GSPO-token's ratio, its
    gradient through its own token only; `plain` takes GSPO's, through all tokens of the response."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        mix = entropy_mix(y.take("entropy")) if weight == "entropy" else [weight] * y.n
        sequence = [sequence_ratio(y)] * y.n if plain and y.n else gspo_token_ratios(y)
        row = []
        for w, r, s in zip(mix, y.ratios(), sequence, strict=True):
            bound_r = clamp(r, 1 - token_low, 1 + token_high)
            bound_s = clamp(s, 1 - sequence_low, 1 + sequence_high)
            row.append(minimum((w * r + (1 - w) * s) * a, (w * bound_r + (1 - w) * bound_s) * a))
        J.append(row)
    return batch.result(-sequence_mean(batch, J), A)
