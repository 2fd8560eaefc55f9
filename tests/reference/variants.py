"""Other published or released forms of the catalogue's methods, under the catalogue's names for them."""

from __future__ import annotations

import math
from functools import partial

from .batch import Batch, centred, clipped, group_token_mean, mean, sequence_mean, sequence_sum, token_mean, z_score
from .grpo_family import cispo, dapo, dhpo, gmpo, pmpo
from .mismatch import corrections, mis, preserving_clip, tis, weighted_clip
from .mixed_policy import compatibility_weight
from .rejection import geometric_weights
from .rejection import rejection as rejected
from .scalar import Value, exp, stop
from .trust_region import m2po_code, minpro_inclusive, rspo_post_clip, rspo_pre_clip, spurious, trm


def atan(x):
    """Inverse tangent; its slope is 1/(1 + x^2)."""
    v = stop(x)
    return Value(math.atan(v), [(x, 1 / (1 + v * v))]) if isinstance(x, Value) else math.atan(v)


def sspo_arctan(case, kappa=1.0, eps=1e-6):
    """A gate with SSPO's reported properties (not the paper's formula): log f = atan(kappa log r)/kappa, pooled."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = []
    for y, a in zip(batch, A, strict=True):
        if y.n:
            J.append(a * exp(sum(atan(kappa * d) / kappa for d in y.log_ratios()) / y.n))
    return batch.result(-sum(J) / max(batch.N, 1), A)


def gppo_dual(case, low=0.2, high=0.28, dual=10.0, eps=1e-6):
    """GPPO with the recipe's dual clip: for A < 0 and r > dual the objective is the constant dual A."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [
        [dual * a if a < 0 and stop(r) > dual else preserving_clip(r, a, low, high) for r in y.ratios()]
        for y, a in zip(batch, A, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A)


def mis_geometric(case, floor=0.999, cap=1.002, low=0.2, high=0.2, eps=1e-6):
    """A response stays iff its geometric rho lies in [floor, cap]; kept ones weigh each token by its own, raw rho."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = [geometric_weights(y, floor, cap) for y in batch]
    return weighted_clip(batch, A, W, low, high, token_mean)


def trm_exact(case, max=0.05, mean=None, eps=1e-6):
    """TRM with the exact gate: the largest full-vocabulary KL(mu || pi) (`kl_sampler`) of the response is at most `max`
    (and its mean at most `mean`)."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    M, J = [], []
    for y, a in zip(batch, A, strict=True):
        D = y.take("kl_sampler")
        near = all(k <= max for k in D) and (mean is None or math.fsum(D) <= mean * y.n)
        M.append([float(near)] * y.n)
        J.append([r * a if near else 0.0 for r in y.ratios("sampler")])
    return batch.result(-sequence_sum(batch, J), A, M)


def moment_mask(values: list[list[float]], over) -> list[list[float]]:
    """Masks over the whole batch: from the largest value down, ties together, tokens go while `over(those left)`."""
    left = sorted(v for row in values for v in row)
    while left and over(left):
        left = [v for v in left if v < left[-1]]
    cut = left[-1] if left else -math.inf
    return [[float(v <= cut) for v in row] for row in values]


def outward_moment_mask(squares: list[list[float]], A: list[float], budget: float) -> list[list[float]]:
    """Masks: the largest squares of outward tokens go, ties together, while the mean of all that are left exceeds
    `budget` and an outward square above the budget is left."""
    tokens = [(v, (a > 0 and v > 1) or (a < 0 and v < 1)) for a, row in zip(A, squares, strict=True) for v in row]
    cut = math.inf
    while True:
        left = [v for v, outward in tokens if not (outward and v >= cut)]
        large = [v for v, outward in tokens if outward and budget < v < cut]
        if not left or mean(left) <= budget or not large:
            break
        cut = max(large)
    return [
        [float(not (v >= cut and ((a > 0 and v > 1) or (a < 0 and v < 1)))) for v in row]
        for a, row in zip(A, squares, strict=True)
    ]


def m2po_areal(case, budget=0.04, low=0.2, high=0.2, eps=1e-6):
    """AReaL's M2PO: all tokens, (log pi_old/mu)^2, strictly below budget, at least one (tied) token stays; the masked
    leave the denominator of PPO's clipped token mean."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    squares = [[math.log(rho) ** 2 for rho in y.corrections()] for y in batch]
    W = moment_mask(squares, lambda left: mean(left) >= budget and left[0] < left[-1])
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(map(sum, W))), A, W)


def m2po_weight_moment(case, budget=1.04, only_outward=False, eps=1e-6):
    """M2PO in terms of the weight: all tokens, mean of (pi_theta/mu)^2 at most budget; masked tokens stay counted.

    `only_outward`: nothing but tokens with A > 0 and r > 1, or A < 0 and r < 1, can be masked; the mean is over all.
    """
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    R = [y.ratios("sampler") for y in batch]
    squares = [[stop(r) ** 2 for r in row] for row in R]
    if only_outward:
        W = outward_moment_mask(squares, A, budget)
    else:
        W = moment_mask(squares, lambda left: mean(left) > budget)
    J = [[w * (r * a) if w else 0.0 for w, r in zip(ws, row, strict=True)] for a, row, ws in zip(A, R, W, strict=True)]
    return batch.result(-token_mean(batch, J), A, W)


def stapo_soft(case, weight=0.5, low=0.2, high=0.28, probability=0.002, quantile=0.75, eps=1e-6):
    """STAPO with spurious tokens weighed down instead of silenced; the denominator is the sum of the weights."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    p = [math.exp(lp.data) for y in batch for lp in y.logp]
    H = [h for y in batch for h in y.take("entropy")]
    of_token = [a for y, a in zip(batch, A, strict=True) for _ in range(y.n)]
    flat = iter(spurious(p, H, of_token, probability, quantile)[2])
    W = [[next(flat) or weight for _ in range(y.n)] for y in batch]
    J = [
        [w * clipped(r, a, low, high) for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(map(sum, W))), A, W)


def stapo_rare(case, low=0.2, high=0.28, probability=0.002, eps=1e-6):
    """STAPO's short form: every token with pi_theta < `probability` is silenced; the denominator counts survivors."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = [[float(math.exp(lp.data) >= probability) for lp in y.logp] for y in batch]
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(map(sum, W))), A, W)


def mini_rl_old(case, low=0.2, high=0.27, cap=5.0):
    """MiniRL as one implementation has it: the weight is min(pi_old/mu, cap), the staleness factor is missing."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, centred)
    W, J = [], []
    for y, a in zip(batch, A, strict=True):
        r = [stop(x) for x in y.ratios()]
        out = [(a > 0 and x > 1 + high) or (a < 0 and x < 1 - low) for x in r]
        w = [0.0 if o else min(rho, cap) for o, rho in zip(out, corrections(y), strict=True)]
        W.append(w)
        J.append([x * a * lp for x, lp in zip(w, y.logp, strict=True)])
    return batch.result(-sequence_sum(batch, J), A, W)


def graft(case, threshold=0.8, low=0.2, high=0.28, eps=1e-6):
    """GRAFT's receiver: its own mean log pi_old against `logp_source` [B], the writer's (NaN: an own response, of
    weight 1). A rejected response leaves the denominator as well."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    W = []
    for y in batch:
        own = y.n == 0 or math.isnan(y.of_row("logp_source"))
        W.append([1.0 if own else compatibility_weight(mean(y.old), y.of_row("logp_source"), threshold)] * y.n)
    J = [
        [w * clipped(r, a, low, high) if w else 0.0 for w, r in zip(row, y.ratios(), strict=True)]
        for y, a, row in zip(batch, A, W, strict=True)
    ]
    return batch.result(-token_mean(batch, J, sum(1 for row in W for w in row if w)), A, W)


def cispo_dynamic(case, cap=5.0, eps=1e-6):
    """CISPO with DAPO's dynamic sampling: over groups whose raw outcomes differ; no length limit."""
    batch = Batch(case, keep=lambda group, y: any(z.reward != group[0].reward for z in group))
    A = batch.by_group(batch.rewards, z_score(eps))
    J = [
        [min(stop(r), cap) * a * lp for r, lp in zip(y.ratios(), y.logp, strict=True)]
        for y, a in zip(batch, A, strict=True)
    ]
    return batch.result(-token_mean(batch, J), A)


def cispo_mask(case, cap=5.0, low=0.2, high=0.28, eps=1e-6):
    """CISPO with its unified mask, at PPO's bounds: no token that moved out of [1-low, 1+high] where A pushes."""
    batch = Batch(case)
    A = batch.by_group(batch.rewards, z_score(eps))
    M, J = [], []
    for y, a in zip(batch, A, strict=True):
        R = [stop(r) for r in y.ratios()]
        M.append([float(not ((a > 0 and r > 1 + high) or (a < 0 and r < 1 - low))) for r in R])
        J.append([m * min(r, cap) * a * lp for m, r, lp in zip(M[-1], R, y.logp, strict=True)])
    return batch.result(-token_mean(batch, J), A, M)


DEFAULT_RULES = ({"statistic": "seq_mean_k3", "upper": 0.01},)

VARIANTS = {
    "dapo-paper-denominator": partial(dapo, average=group_token_mean),
    "dapo-sequence-mean": partial(dapo, average=sequence_mean),
    "cispo-floor": partial(cispo, floor=0.8, cap=1.2),
    "cispo-band": partial(cispo, floor=0.8, cap=1.2, average=sequence_mean),
    "cispo-mask": cispo_mask,
    "cispo-dynamic": cispo_dynamic,
    "gmpo-literal": partial(gmpo, literal=True),
    "pmpo-half": partial(pmpo, p=0.5),
    "sspo-arctan": sspo_arctan,
    "dhpo-plain": partial(dhpo, plain=True),
    "dhpo-entropy": partial(dhpo, weight="entropy"),
    "gppo-dual": gppo_dual,
    "minpro-inclusive": minpro_inclusive,
    "rspo-pre-clip": rspo_pre_clip,
    "rspo-post-clip": rspo_post_clip,
    "tis-sequence": partial(tis, level="sequence"),
    "mis-sequence": partial(mis, level="sequence"),
    "mis-geometric": mis_geometric,
    "trm-both": partial(trm, mean=0.001),
    "trm-kept": partial(trm, over="kept"),
    "trm-exact": trm_exact,
    "m2po-code": m2po_code,
    "m2po-areal": m2po_areal,
    "m2po-weight-moment": m2po_weight_moment,
    "stapo-soft": stapo_soft,
    "stapo-rare": stapo_rare,
    "mini_rl-old": mini_rl_old,
    "rejection": partial(rejected, rules=DEFAULT_RULES, over="kept"),
    "graft": graft,
}
