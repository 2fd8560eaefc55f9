"""Methods whose weight, advantage or loss couples the tokens or responses of a batch or group, and labelled
reconstructions (ConSPO, GGPO, Range-GRPO's point limit) that no one should call the papers' objectives."""

from __future__ import annotations

import math

from .batch import (
    Batch,
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
from .scalar import clamp, exp, log, stop


def most_surprising(s: list[float], chosen: list[bool], fraction: float) -> list[bool]:
    """The top max(1, ceil(fraction n)) of the chosen tokens by surprisal; those tied with the last belong to them."""
    pool = sorted((x for x, c in zip(s, chosen, strict=True) if c), reverse=True)
    if not pool:
        return [False] * len(s)
    cut = pool[max(1, math.ceil(fraction * len(pool))) - 1]
    return [c and x >= cut for x, c in zip(s, chosen, strict=True)]


def stare(case, fraction=0.1, W=1.1, M=0.9, target_entropy=0.3, variant="O1", low=0.2, high=0.28, dual=3.0, eps=1e-6):
    """STARE, arXiv 2606.19236: J = sum_it omega min(...) / sum_i n_i (dual clip for A < 0).

    While the batch's mean entropy is below target: omega = W on the most surprising tokens with A > 0, and in variant
    C2 also M on the most surprising with A < 0. Otherwise 1. Surprisal is -log pi_theta, detached.
    """
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    a_of = [a for y, a in zip(batch, A, strict=True) for _ in range(y.n)]
    s = [-lp.data for y in batch for lp in y.logp]
    H = [h for y in batch for h in y.take("entropy")]
    omega = [1.0] * len(s)
    if H and mean(H) < target_entropy:
        boosted = most_surprising(s, [a > 0 for a in a_of], fraction)
        damped = most_surprising(s, [a < 0 and variant == "C2" for a in a_of], fraction)
        omega = [W if b else M if d else 1.0 for b, d in zip(boosted, damped, strict=True)]
    flat = iter(omega)
    weights = [[next(flat) for _ in range(y.n)] for y in batch]
    J = [
        [w * dual_clipped(r, a, low, high, dual) for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, weights, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A, weights)


def stare_adapted(W: float, M: float, entropy: float, target: float, step: float = 0.01) -> tuple[float, float]:
    """One adaptive step: W up and M down while the entropy is below target, W in [1, 1.5], M in [.5, 1]."""
    sign = math.copysign(1.0, target - entropy) if target != entropy else 0.0
    return clamp(W + step * sign, 1.0, 1.5), clamp(M - step * sign, 0.5, 1.0)


def zcpo_coefficients(rewards: list[float], divergence: list[float], beta: float) -> list[float]:
    """C_i = A_i/s - beta (D_i - mean D) in one group, A = R - mean, s = max |A|; 0 in a uniform or single group."""
    if constant(rewards):
        return [0.0] * len(rewards)
    A = [r - mean(rewards) for r in rewards]
    s = max(abs(a) for a in A)
    return [a / s - beta * (d - mean(divergence)) for a, d in zip(A, divergence, strict=True)]


def zcpo(case, beta=4.0, low=0.2, high=0.28):
    """ZCPO, arXiv 2610.12161: DAPO's clipped token mean with C_i for the advantage; no other KL term.

    D_i is the mean over tokens of the full-vocabulary KL(pi_theta || pi_ref) (`kl_ref`, detached; 0 for an empty row).
    Ours: uniform groups give 0 and stay in the denominator (no resampling here).
    """
    batch = Batch(case)
    D = [mean(y.take("kl_ref")) if y.n else 0.0 for y in batch]
    C = []
    for i, y in enumerate(batch):
        members = batch.group_of(y)
        group = zcpo_coefficients([batch.responses[j].reward for j in members], [D[j] for j in members], beta)
        C.append(group[members.index(i)])
    J = [[clipped(r, c, low, high) for r in y.ratios()] for y, c in zip(batch, C, strict=True)]
    return batch.result(-token_mean(batch, J), C)


def trajectory_ratio(y) -> float:
    """prod_t pi_theta/pi_old, its logarithm saturated, detached."""
    return math.exp(saturate(math.fsum(stop(d) for d in y.log_ratios())))


def gmc_grpo(case, cap=2.0, average=sequence_mean, eps=1e-6):
    """Group-mass capping, arXiv 2610.01896: w_i = r_i min(1, cap / sum_j r_j) over a prompt's trajectory ratios,
    detached, on A log pi_theta. The cap, the score form and the average are ours (the source doesn't give them)."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    r = [trajectory_ratio(y) for y in batch]
    w = [r[i] * min(1.0, cap / math.fsum(r[j] for j in batch.group_of(y))) for i, y in enumerate(batch)]
    J = [[w[i] * A[i] * lp for lp in y.logp] for i, y in enumerate(batch)]
    return batch.result(-average(batch, J), A, w)


def variance_ratio(logp: float, old: float) -> float:
    """ReCo's v = p(1-p) / (p_old (1-p_old)), exact for p near 1."""
    return math.exp(logp - old) * math.expm1(logp) / math.expm1(old)


def reco(case, eps=1e-6):
    """ReCo, arXiv 2607.26862: the gradient is u_i v_it A_i grad log pi, v detached, u_i = 1/(G pibar_old(y_i)).

    Ours: pibar is the geometric mean exp(mean log pi_old); 1/G and the mean over prompts make (1/N) sum over tokens.
    """
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = []
    for y in batch:
        u = math.exp(saturate(-mean(y.old))) if y.n else 0.0
        v = [variance_ratio(lp.data, old) for lp, old in zip(y.logp, y.old, strict=True)]
        W.append([u * clamp(x, math.exp(-20), math.exp(20)) for x in v])
    J = [[w * a * lp for w, lp in zip(row, y.logp, strict=True)] for y, a, row in zip(batch, A, W, strict=True)]
    return batch.result(-sequence_sum(batch, J), A, W)


def acceptance(ratio: float, envelope: float, inside: bool) -> float:
    """SIS: the chance to accept a token drawn from pi_old as one of pi_theta's; 0 outside the top K."""
    return min(1.0, ratio / envelope) if inside else 0.0


def sis_position(old: list[float], new: list[float], top_k: int, low: float, high: float) -> dict:
    """One position of SIS over a whole vocabulary: envelope, acceptance per token, and the expected weight mass."""
    top = sorted(range(len(old)), key=lambda v: -old[v])[:top_k]
    envelope = max(new[v] / old[v] for v in top)
    a = [acceptance(new[v] / old[v], envelope, v in top) for v in range(len(old))]
    g = [clamp(n / o, 1 - low, 1 + high) for n, o in zip(new, old, strict=True)]
    mass = [o * (x + (1 - x) * y) for o, x, y in zip(old, a, g, strict=True)]
    return {
        "envelope": envelope,
        "acceptance": a,
        "acceptance_rate": math.fsum(o * x for o, x in zip(old, a, strict=True)),
        "expected_weight_mass": mass,
        "expected_weight_total": math.fsum(mass),
    }


def sis(case, uniforms, low=0.2, high=0.2, average=sequence_mean, eps=1e-6):
    """SIS, arXiv 2607.04728, on GRPO: an accepted token has weight 1 (and its gradient: exp(log pi - sg[log pi])), any
    other the clipped surrogate. `uniforms` [B][T] decide: accepted where u < min(1, r/M), M over pi_old's top K."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        ids, old_k, new_k, token = (y.take(n) for n in ("topk_ids", "topk_logp_old", "topk_logp", "tokens"))
        row = []
        for t, r in enumerate(y.ratios()):
            M = max(math.exp(saturate(n - o)) for n, o, v in zip(new_k[t], old_k[t], ids[t], strict=True) if v >= 0)
            accepted = uniforms[y.row][y.positions[t]] < acceptance(stop(r), M, token[t] in ids[t])
            row.append(exp(y.logp[t] - stop(y.logp[t])) * a if accepted else clipped(r, a, low, high))
        J.append(row)
    return batch.result(-average(batch, J), A)


# ---- labelled reconstructions ---------------------------------------------------------------------------------------


def groups(batch: Batch) -> list[list[int]]:
    """The batch's groups as lists of indices, in order of appearance."""
    return [batch.group_of(y) for i, y in enumerate(batch) if batch.group_of(y)[0] == i]


def log_sum_exp(values: list):
    """log sum e^v, shifted by the largest."""
    top = max(stop(v) for v in values)
    return log(sum(exp(v - top) for v in values)) + top


def conspo(case, tau=1.0, margin=0.0, positive=None):
    """ConSPO, arXiv 2605.12969, a reconstruction: InfoNCE of length-normalised log-probs in each group,
    -(1/|P|) sum_P log[ e^((s_i-m)/tau) / (e^((s_i-m)/tau) + sum_N e^(s_j/tau)) ], mean over groups with both kinds.

    Positive: reward above the group's mean, or as `positive` [B] says. tau and margin aren't published.
    """
    batch = Batch(case)
    good = batch.by_group(batch.rewards, lambda g, k: float(g[k] > mean(g)))
    good = good if positive is None else [float(positive[y.row]) for y in batch]
    losses = []
    for members in groups(batch):
        s = {j: sum(batch.responses[j].logp) / batch.responses[j].n for j in members if batch.responses[j].n}
        P, N = [j for j in s if good[j]], [j for j in s if not good[j]]
        if P and N:
            up = {i: (s[i] - margin) / tau for i in P}
            losses.append(sum(log_sum_exp([up[i]] + [s[j] / tau for j in N]) - up[i] for i in P) / len(P))
    return batch.result(sum(losses) / len(losses) if losses else 0.0, [0.0] * batch.N)


def ggpo(case, beta=1.0):
    """GGPO, arXiv 2610.20814, a reconstruction: z_i = R_i/beta - log(pi_theta(y_i)/pi_ref(y_i)), loss = log mean e^z -
    mean z, averaged over mixed groups (empty responses left out). Zero iff all z of a group are equal."""
    batch = Batch(case)
    losses = []
    for members in groups(batch):
        ys = [batch.responses[j] for j in members if batch.responses[j].n]
        if ys and not constant([y.reward for y in ys]):
            z = [y.reward / beta - (sum(y.logp) - math.fsum(y.take("logp_ref"))) for y in ys]
            losses.append(log_sum_exp(z) - math.log(len(z)) - sum(z) / len(z))
    return batch.result(sum(losses) / len(losses) if losses else 0.0, [0.0] * batch.N)


def range_grpo(case, low=0.2, high=0.2, length=None):
    """Range-GRPO, arXiv 2610.01548, the limit of zero-width intervals: A_i = mean_j (R_i - R_j), which is Dr. GRPO."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, lambda g, k: mean([g[k] - other for other in g]))
    J = [[clipped(r, a, low, high) / length for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_sum(batch, J), A)
