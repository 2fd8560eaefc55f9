"""Distillation inside RL: gaps to a teacher on the sampled tokens, divergences given per token, and their mixtures.

A divergence is an input here (`kl_teacher`); how it is formed has its own tests.
"""

from __future__ import annotations

import math

from .batch import (
    Batch,
    clipped,
    constant,
    mean,
    saturate,
    sequence_mean,
    sequence_sum,
    token_mean,
    variance,
    z_score,
)
from .scalar import Value, gradients, stop


def hinted(y) -> bool:
    """Whether the row has a teacher; every row where the case does not say."""
    field = y.case["rollouts"].get("hinted")
    return True if field is None else bool(field[y.row])


def gaps(y, anchor: str = "old") -> list[float]:
    """log q - log p of each sampled token, p the named policy; 0 without a hint."""
    mine = [stop(x) for x in y.logp] if anchor == "current" else y.anchor(anchor)
    found = [saturate(q - p) for q, p in zip(y.take("logp_teacher"), mine, strict=True)]
    return found if hinted(y) else [0.0] * y.n


def discounted(x: list[float], d: float) -> list[float]:
    return [math.fsum(d ** (s - t) * x[s] for s in range(t, len(x))) for t in range(len(x))]


def scaled(rows: list[list], weights: list[list]) -> list[list]:
    return [[w * j for w, j in zip(ws, js, strict=True)] for ws, js in zip(weights, rows, strict=True)]


def opd(case, coef=1.0, anchor="old", discount=0.0, clip=0.2, average=token_mean, drop=None, drift=0.0):
    """A = coef * gap (or its discounted later sum). Anchor "old" clips pi/pi_old; the others take pi/mu unclipped, with
    tokens whose probability fell by more than `drop` at weight 0 and drift * log^2(pi/mu) added to every token."""
    batch = Batch(case)
    A = [[coef * g for g in gaps(y, anchor)] for y in batch]
    A = [discounted(a, discount) for a in A] if discount else A
    if anchor == "old":
        J = [
            [clipped(r, a, clip, clip) for r, a in zip(y.ratios(), row, strict=True)]
            for y, row in zip(batch, A, strict=True)
        ]
        return batch.result(-average(batch, J), A)
    W = [[1.0 if drop is None or math.exp(stop(x)) - math.exp(mu) >= -drop else 0.0
          for x, mu in zip(y.logp, y.anchor("sampler"), strict=True)] for y in batch]  # fmt: skip
    J = [
        [
            w * a * r - drift * d * d
            for w, a, r, d in zip(ws, row, y.ratios("sampler"), y.log_ratios("sampler"), strict=True)
        ]
        for y, row, ws in zip(batch, A, W, strict=True)
    ]
    return batch.result(-average(batch, J), A, W)


def prefix_weights(A: list[float], boost: float) -> list[float]:
    whole = math.fsum(abs(a) for a in A)
    if whole == 0:
        return [1.0] * len(A)
    return [1 + boost * (1 - math.fsum(abs(a) for a in A[:t]) / whole) for t in range(len(A))]


def opd_prefix(case, coef=1.0, boost=0.5):
    """Score function with weight 1 + boost (1 - earlier |A| / the response's |A|)."""
    batch = Batch(case)
    A = [[coef * g for g in gaps(y)] for y in batch]
    W = [prefix_weights(a, boost) for a in A]
    J = scaled([[a * x for a, x in zip(row, y.logp, strict=True)] for y, row in zip(batch, A, strict=True)], W)
    return batch.result(-token_mean(batch, J), A, W)


def opsa(case, share=0.2, adaptive=True, value=-0.5, clip=0.2):
    """Clipped surrogate on the floor(share N) tokens of lowest log pi_old (with those tied), A negative; only they are
    in a response's mean; a response without one adds 0 and is counted."""
    batch = Batch(case)
    olds = sorted(o for y in batch for o in y.old)
    cut = olds[max(1, math.floor(share * len(olds) + 1e-9)) - 1] if olds else 0.0
    chosen = [[o <= cut for o in y.old] for y in batch]
    H = [
        h
        for y, row in zip(batch, chosen, strict=True)
        for h, c in zip(y.take("entropy") if adaptive else y.old, row, strict=True)
        if c
    ]

    def advantage(h):
        return -0.5 - 0.5 * ((h - min(H)) / (max(H) - min(H)) if max(H) > min(H) else 1.0) if adaptive else value

    A = [
        [advantage(h) if c else 0.0 for h, c in zip(y.take("entropy") if adaptive else y.old, row, strict=True)]
        for y, row in zip(batch, chosen, strict=True)
    ]
    J = [
        [clipped(r, a, clip, clip) for r, a, c in zip(y.ratios(), row, keep, strict=True) if c]
        for y, row, keep in zip(batch, A, chosen, strict=True)
    ]
    loss = -sequence_mean(batch, J)
    return batch.result(loss, A, [[float(c) for c in row] for row in chosen])


def divergences(batch) -> list[list[Value]]:
    """`kl_teacher` of the trained tokens, with a history."""
    return [[Value(x) for x in y.take("kl_teacher")] for y in batch]


def slopes(batch, loss, D) -> dict:
    """{"kl_teacher": d loss / d kl_teacher} as [B][T]."""
    return {"kl_teacher": batch.spread([gradients(loss, row) for row in D])}


def gkd(case, own=None):
    """The mean over responses of the mean divergence; with `own` the policy's rows and the others' (origin not 0) each
    by their own mean, weighed own and 1 - own."""
    batch = Batch(case)
    D = divergences(batch)
    if own is None:
        loss, W = sequence_mean(batch, D), None
    else:
        mine = [y.of_row("origin") == 0 for y in batch]
        loss, W = 0.0, [0.0] * batch.N
        for side, share in ((True, own), (False, 1 - own)):
            rows = [k for k in range(batch.N) if mine[k] == side]
            loss = loss + (share * sum(sum(D[k]) / len(D[k]) for k in rows if D[k]) / len(rows) if rows else 0.0)
            for k in rows:
                W[k] = share * batch.N / len(rows)
    return *batch.result(loss, [1.0] * batch.N, W), slopes(batch, loss, D)


def future_means(g: list[float], normalise=True) -> list[float]:
    later = [g[t + 1 :] for t in range(len(g))]
    return [math.fsum(x) / (len(x) if normalise else 1) if x else 0.0 for x in later]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    if len(flat) < 2 or constant(flat):
        return [[0.0] * len(row) for row in rows]
    m, v = mean(flat), variance(flat)
    return [[(x - m) / math.sqrt(v + 1e-8) for x in row] for row in rows]


def minillm(case, inclusive=False, gamma=0.95, clip=0.2):
    """-clipped rho R + sg(rho) D, rho = pi/mixture; the inclusive form counts this token in R, whitens, and leaves D
    unweighted, over the token mean."""
    batch = Batch(case)
    G = [gaps(y) for y in batch]
    if inclusive:
        R = whitened([[x / (len(g) - t) for t, x in enumerate(discounted(g, gamma))] for g in G])
    else:
        R = [future_means(g) for g in G]
    D, average = divergences(batch), token_mean if inclusive else sequence_sum
    J = [
        [
            (0.0 if a == 0 else clipped(r, a, clip, clip)) - (1.0 if inclusive else stop(r)) * d
            for r, a, d in zip(y.ratios("sampler"), row, ds, strict=True)
        ]
        for y, row, ds in zip(batch, R, D, strict=True)
    ]
    loss = -average(batch, J)
    return *batch.result(loss, R), slopes(batch, loss, D)


def sdpo_weights(y, cap=2.0, sampler_cap=2.0) -> list[float]:
    if not hinted(y):
        return [0.0] * y.n
    return [min(stop(r), cap) * min(c, sampler_cap) for r, c in zip(y.ratios(), y.corrections(), strict=True)]


def sdpo(case, cap=2.0, sampler_cap=2.0, sampled=False, weighted=True):
    """The weighted divergence (or sg(log p - log q) log p) summed over hinted rows' tokens / their number."""
    batch = Batch(case)
    W = [sdpo_weights(y, cap, sampler_cap) if weighted else [float(hinted(y))] * y.n for y in batch]
    n = sum(y.n for y in batch if hinted(y))
    D = divergences(batch)
    A = [gaps(y, "current") for y in batch] if sampled else [[1.0] * y.n for y in batch]
    J = [[-a * x for a, x in zip(row, y.logp, strict=True)] for y, row in zip(batch, A, strict=True)] if sampled else D
    loss = sum(sum(row) for row in scaled(J, W)) / n if n else 0.0
    result = batch.result(loss, A, W)
    return result if sampled else (*result, slopes(batch, loss, D))


def teacher_mixed(case, share=0.5, rule="convex", coef=1.0, clip=0.2, advantage=None):
    """share A + (1 - share) g, A + coef g, or two losses: the clipped one of A, and over hinted rows' tokens the mean
    of coef sg(log p - log q) log p."""
    batch = Batch(case)
    own = batch.by_group(batch.rewards, advantage or z_score())
    G = [gaps(y) for y in batch]
    if rule == "losses":
        A = [[a] * y.n for a, y in zip(own, batch, strict=True)]
    else:
        u, v = (share, 1 - share) if rule == "convex" else (1.0, coef)
        A = [[u * a + v * x for x in g] for a, g in zip(own, G, strict=True)]
    J = [
        [clipped(r, a, clip, clip) for r, a in zip(y.ratios(), row, strict=True)]
        for y, row in zip(batch, A, strict=True)
    ]
    loss = -token_mean(batch, J)
    if rule == "losses":
        terms = [-g * x for y in batch if hinted(y) for g, x in zip(gaps(y, "current"), y.logp, strict=True)]
        loss = loss + (coef * sum(terms) / len(terms) if terms else 0.0)
    return batch.result(loss, A)
