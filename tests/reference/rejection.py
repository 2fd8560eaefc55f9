"""Which tokens or responses are trusted at all: rejection rules on rho = pi_old/mu, and off-policy sequence masking."""

from __future__ import annotations

import math

from .batch import Batch, clipped, mean, saturate, token_mean, z_score
from .scalar import stop

ESTIMATORS = {
    "k1": lambda x: -x,  # x = log rho
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}


def log_rho(y) -> list[float]:
    """log pi_old - log mu per token, saturated."""
    return [saturate(o - m) for o, m in zip(y.old, y.take("logp_sampler"), strict=True)]


def statistic(y, name: str):
    """{token, seq_sum, seq_mean, seq_max}_{k1, k2, k3}: a list over tokens, or a number (0 for an empty response)."""
    level, estimator = name.rsplit("_", 1)
    values = [ESTIMATORS[estimator](x) for x in log_rho(y)]
    if level == "token":
        return values
    pool = {"seq_sum": math.fsum, "seq_mean": mean, "seq_max": max}[level]
    return pool(values) if values else 0.0


def accepts(rule: dict, value: float) -> bool:
    """k2, k3: at most `upper`. k1: the ratio in [lower, upper]; `band_on` says whether the ratio is rho or 1/rho."""
    if not rule["statistic"].endswith("k1"):
        return value <= rule["upper"]
    ratio = math.exp(value if rule["band_on"] == "inverse_rho" else -value)
    return rule["lower"] <= ratio <= rule["upper"]


def keep(y, rules: list[dict]) -> list[float]:
    """1 for the tokens that every rule accepts (a response-level rule speaks for all its tokens)."""
    out = [1.0] * y.n
    for rule in rules:
        value = statistic(y, rule["statistic"])
        values = value if isinstance(value, list) else [value] * y.n
        out = [k * float(accepts(rule, v)) for k, v in zip(out, values, strict=True)]
    return out


def geometric_ratio(y) -> float:
    """exp(mean log rho) of a response (1 if it is empty)."""
    return math.exp(mean(log_rho(y))) if y.n else 1.0


def geometric_weights(y, lower: float, upper: float, veto: float | None = None) -> list[float]:
    """Raw token rho of a response whose geometric ratio lies in [lower, upper] if no rho is below `veto`."""
    rho = [math.exp(x) for x in log_rho(y)]
    trusted = lower <= geometric_ratio(y) <= upper and not (veto is not None and any(x < veto for x in rho))
    return rho if trusted else [0.0] * y.n


def drift(y) -> float:
    """mean_t log(pi_old/pi_theta) of a response (0 if it is empty)."""
    return -mean([stop(d) for d in y.log_ratios()]) if y.n else 0.0


def opsm(case, delta=0.5, low=0.2, high=0.2, over="all", eps=1e-6):
    """Off-policy sequence masking (DeepSeek-V3.2): a response with A < 0 and mean_t log(pi_old/pi_theta) > delta drops
    out of GRPO's clipped token mean; its tokens stay in the denominator (`over="all"`) or leave it ("kept")."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [[float(not (a < 0 and drift(y) > delta))] * y.n for y, a in zip(batch, A, strict=True)]
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(map(sum, W)) if over == "kept" else None), A, W)


def rejection(case, rules=(), low=0.2, high=0.2, over="all", eps=1e-6):
    """GRPO's clipped token mean over the tokens that all rules accept; `over` as in `opsm`."""
    batch = Batch(case)
    A = batch.advantages(z_score(eps))
    W = [keep(y, list(rules)) for y in batch]
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(map(sum, W)) if over == "kept" else None), A, W)
