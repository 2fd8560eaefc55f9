"""Rewards and advantages that come before any ratio: trackers, risk measures, frequencies, votes, several axes."""

from __future__ import annotations

import math
from collections import Counter

from .batch import constant, mean, variance, z_score

# ---- SPO: one Beta tracker per prompt -------------------------------------------------------------------------------


def beta_start(successes: int, samples: int, rho_min: float = 0.875, smoothed: bool = True) -> tuple[float, float]:
    """(alpha, beta) worth N0 = 1/(1 - rho_min) samples from an offline estimate; no samples: (.5, .5)."""
    if not samples:
        return 0.5, 0.5
    N0, s = 1 / (1 - rho_min), 0.5 if smoothed else 0.0
    total = samples + 2 * s
    return N0 * (successes + s) / total, N0 * (samples - successes + s) / total


def forgetting(drift: float, half_life: float = 0.06, low: float = 0.875, high: float = 0.96) -> float:
    """rho = 2^(-drift / half_life), held in [low, high]."""
    return min(max(2 ** (-drift / half_life), low), high)


def spo_step(trackers: dict, batch: list[dict], rho, ema: bool = False) -> dict:
    """One batch of single-stream PO, arXiv 2509.13232: every row reads its baseline before any row is folded in.

    trackers: prompt -> (alpha, beta), or [value, count] for the moving average. rho: a function of a row. A = r - v,
    normalised over the batch (std ddof 1, + 1e-8).
    """

    def value(prompt):
        a, b = trackers[prompt]
        return a if ema else a / (a + b)

    baseline = [value(row["prompt"]) for row in batch]
    raw = [row["reward"] - v for row, v in zip(batch, baseline, strict=True)]
    rhos, after = [rho(row) for row in batch], dict(trackers)
    for row, p in zip(batch, rhos, strict=True):
        a, b = after[row["prompt"]]
        if ema:
            count = p * b + 1
            after[row["prompt"]] = (a + (row["reward"] - a) / count, count)
        else:
            after[row["prompt"]] = (p * a + row["reward"], p * b + 1 - row["reward"])
    flat = len(raw) < 2 or constant(raw)
    scale = 1.0 if flat else math.sqrt(variance(raw)) + 1e-8
    return {
        "baseline": baseline,
        "advantages_raw": raw,
        "advantages": [0.0 if flat else (x - mean(raw)) / scale for x in raw],
        "forgetting": rhos,
        "trackers_after": after,
    }


def sampling_weight(alpha: float, beta: float) -> float:
    """sqrt(v (1 - v)) + .05: prompts near one half are drawn more often."""
    v = alpha / (alpha + beta)
    return math.sqrt(v * (1 - v)) + 0.05


# ---- RiskPO: tail and range expectations of bundle scores -----------------------------------------------------------


def above(z: float, q: float) -> float:
    return max(z - q, 0.0)


def risk_paper(z: float, qa: float, qb: float, omega: float = 0.5) -> float:
    """A(z) = -(1 + omega) (q_a - z)^+ + (z - q_a)^+ - (z - q_b)^+ + q_a - q_b: never positive, flat above q_b."""
    return -(1 + omega) * max(qa - z, 0.0) + above(z, qa) - above(z, qb) + qa - qb


def risk_code(z: float, qa: float, qb: float, alpha: float, beta: float, mix: float, baseline: bool = False) -> float:
    """The release's (mix * tail + range)/(mix + 1), each divided by its mass (+1e-6)."""
    inside = (above(z, qa) - above(z, qb) + (qa - qb if baseline else 0.0)) / (beta - alpha + 1e-6)
    tail = -max(qa - z, 0.0) / (alpha + 1e-6)
    return (mix * tail + inside) / (mix + 1)


def sum_mean_credit(A: list[float], scores: list[list[float]]) -> list[list[float]]:
    """A_b (score - question mean) / sum of those over the bundle; equal shares where that sum is within 1e-6 of 0."""
    question = [mean(list(column)) for column in zip(*scores, strict=True)]
    out = []
    for a, row in zip(A, scores, strict=True):
        lead = [s - m for s, m in zip(row, question, strict=True)]
        total = math.fsum(lead)
        out.append([a / len(row)] * len(row) if abs(total) <= 1e-6 else [a * x / total for x in lead])
    return out


def quantile_step(q: list[float], levels: list[float], scores: list[float], lr: float) -> list[float]:
    """q + lr (level - share of scores below q)."""
    return [x + lr * (level - mean([float(s < x) for s in scores])) for x, level in zip(q, levels, strict=True)]


# ---- frequencies and votes ------------------------------------------------------------------------------------------


def gapo_rewards(valid: list[str], outputs: list[str], normalised: bool = False) -> list[float]:
    """GAPO, arXiv 2511.12596, one group: 1 - (f - 1/L) for a valid output, f its share of the valid ones; else -1."""
    if normalised:
        valid, outputs = [v.strip().lower() for v in valid], [o.strip().lower() for o in outputs]
    count = Counter(o for o in outputs if o in valid)
    total = sum(count.values())
    return [1 - (count[o] / total - 1 / len(valid)) if o in count else -1.0 for o in outputs]


MADRL = {
    "l2": lambda p, f: p - f,
    "forward_kl": lambda p, f: p / f - 1,
    "reverse_kl": lambda p, f: math.log(p) - math.log(f),
    "jsd": lambda p, f: 0.5 * (math.log((p + f) / 2) - math.log(f)),
}


def madrl_rewards(target: dict, categories: list, kind: str, floor: float = 1e-6, invalid: float = -1.0) -> list[float]:
    """MaD-RL, one group: minus the slope of D(target, f) in f_k; invalid outputs stay in the denominator of f."""
    f = {k: categories.count(k) / len(categories) for k in target}
    return [invalid if c not in f else MADRL[kind](target[c], max(f[c], floor)) for c in categories]


def majority(answers: list, voters: int | None = None):
    """(label, votes) among the first `voters` answers; None doesn't vote, and the answer seen first wins a tie."""
    votes = [a for a in answers[:voters] if a is not None]
    if not votes:
        return None, 0
    label = max(dict.fromkeys(votes), key=votes.count)
    return label, votes.count(label)


def rlcr_reward(correct: bool, confidence: float, form: float = 0.0) -> float:
    """RLCR, arXiv 2507.16806: c - (q - c)^2 + format reward."""
    return correct - (confidence - correct) ** 2 + form


def gprl(axes: list[list[float]], weights: list[float], ddof: int = 1, eps: float = 1e-4) -> dict:
    """Per-axis z-scores of one group, their weighted sum, and how much the largest axis dominates."""
    rule = z_score(eps, ddof)
    A = [[rule(axis, k) for k in range(len(axis))] for axis in axes]
    share = [mean([abs(w * a) for a in axis]) for w, axis in zip(weights, A, strict=True)]
    return {
        "axis_advantages": A,
        "advantages": [math.fsum(w * axis[k] for w, axis in zip(weights, A, strict=True)) for k in range(len(A[0]))],
        "dominance": max(share) / math.fsum(share),
    }


def repo_swap(rewards: list[float], rephrased: float | None, delta: float = 0.5, rho: float = 0.75) -> dict:
    """RePO, arXiv 2602.10819: where at least a share rho failed (R < delta), the lowest reward (first on ties) is
    replaced by the rephrased answer's, if that one is better."""
    rate = mean([float(r < delta) for r in rewards])
    victim = min(range(len(rewards)), key=lambda k: rewards[k])
    swap = rephrased is not None and rate >= rho and rephrased > rewards[victim]
    final = [rephrased if swap and k == victim else r for k, r in enumerate(rewards)]
    return {"failure_rate": rate, "replaced": victim if swap else None, "rewards": final}


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k)/C(n, k): the chance that k of the n samples, drawn without replacement, hold a correct one."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)
