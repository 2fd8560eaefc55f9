"""Objectives on rewards that a group, a memory or several axes make: TTRL, GAPO, MaD-RL, SPO, RLCR, GPRL, RiskPO."""

from __future__ import annotations

import math

from .batch import Batch, clipped, dual_clipped, mean, quantile, sequence_mean, token_mean, z_score
from .grpo_family import k3, sequence_ratio
from .outcomes import gapo_rewards, madrl_rewards, majority, risk_code, risk_paper, rlcr_reward, spo_step
from .scalar import stop
from .teachers import divergences, hinted, slopes


def zscored(case, rewards, eps, ddof, beta):
    """GRPO on rewards that the group made for itself (`rewards`: a function of one group's responses)."""
    batch = Batch(case)
    shaped = [0.0] * batch.N
    for i, y in enumerate(batch):
        members = batch.group_of(y)
        shaped[i] = rewards([batch.responses[j] for j in members])[members.index(i)]
    A = batch.by_group(shaped, z_score(eps, ddof))
    J = []
    for y, a in zip(batch, A, strict=True):
        row = [clipped(r, a, 0.2, 0.2) for r in y.ratios()]
        if beta:
            row = [j - beta * k3(lp, q) for j, lp, q in zip(row, y.logp, y.take("logp_ref"), strict=True)]
        J.append(row)
    return batch.result(-sequence_mean(batch, J), A)


def answer_of(y):
    """The answer's identity, None if there is none."""
    return None if y.of_row("answer") < 0 else y.of_row("answer")


def ttrl(case):
    """TTRL, arXiv 2504.16084: 1 for the group's most frequent answer (the smallest identity on a tie), else 0."""

    def vote(group):
        label, _ = majority(sorted(a for a in map(answer_of, group) if a is not None))
        return [float(label is not None and answer_of(y) == label) for y in group]

    return zscored(case, vote, 1e-6, 1, 0.0)


def gapo(case):
    """GAPO, arXiv 2511.12596, over answer identities."""

    def rarity(group):
        valid = [str(t) for t in group[0].of_row("target_ids") if t >= 0]
        return gapo_rewards(valid, [str(y.of_row("answer")) for y in group])

    return zscored(case, rarity, 1e-4, 0, 0.04)


def mad_rl(case, kind="reverse_kl"):
    """MaD-RL with one of its divergences."""

    def slope(group):
        ids, p = group[0].of_row("target_ids"), group[0].of_row("target_prob")
        target = {t: x for t, x in zip(ids, p, strict=True) if t >= 0}
        return madrl_rewards(target, [answer_of(y) for y in group], kind)

    return zscored(case, slope, 1e-6, 1, 0.04)


def spo(case, low=0.2, high=0.28, dual=10.0):
    """SPO, arXiv 2509.13232, first batch: every tracker at one half."""
    batch = Batch(case)
    rows = [{"prompt": y.of_row("prompt_id"), "reward": y.reward} for y in batch]
    A = spo_step({row["prompt"]: (0.5, 0.5) for row in rows}, rows, lambda row: 0.96)["advantages"] if rows else []
    J = [[dual_clipped(r, a, low, high, dual) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-token_mean(batch, J), A)


def rlcr(case, invalid=-1.0):
    """RLCR, arXiv 2507.16806: c - (q - c)^2 of a stated confidence q in [0, 1], else `invalid`."""

    def reward(y):
        q = case["rollouts"]["reward_parts"]["confidence"][y.row]
        return rlcr_reward(y.reward, q) if 0 <= q <= 1 else invalid

    return zscored(case, lambda group: [reward(y) for y in group], 1e-6, 1, 0.0)


def gprl(case, eps=1e-4):
    """GPRL's advantage, arXiv 2605.18721: z-scores of each axis among those that have it (NaN: none), added."""
    batch = Batch(case)
    A = [0.0] * batch.N
    for axis in case["rollouts"]["reward_parts"].values():
        for i, y in enumerate(batch):
            having = [j for j in batch.group_of(y) if not math.isnan(axis[batch.responses[j].row])]
            if i in having:
                A[i] += z_score(eps, 1)([axis[batch.responses[j].row] for j in having], having.index(i))
    J = [[clipped(r, a, 0.2, 0.2) for r in y.ratios()] for y, a in zip(batch, A, strict=True)]
    return batch.result(-sequence_mean(batch, J), A)


def shuffled(y):
    """Where a response stands when bundles are drawn: the digits of its sampler's log-prob, behind the fifth or so."""
    return (math.fsum(y.take("logp_sampler")) * 1e3 * 0.6180339887498949) % 1.0


def bundles(batch, size, key):
    """Lists of responses: the k-th (by `key`) of each of `size` questions, in the order of the questions' numbers."""
    questions = sorted({y.group for y in batch})
    made = []
    for at in range(0, len(questions), size):
        lines = [sorted((y for y in batch if y.group == g), key=key) for g in questions[at : at + size]]
        made += [[line[k] for line in lines if k < len(line)] for k in range(max(map(len, lines)))]
    return made


def riskpo(case, masses=False, size=5, low=0.2, high=0.2):
    """RiskPO, arXiv 2510.00911, first batch: its own quantiles. `masses`: the release's parametrisation."""
    batch = Batch(case)
    made = bundles(batch, size, shuffled)
    z = [size * mean([y.reward for y in bundle]) for bundle in made]
    A = [0.0] * batch.N
    if z:
        qa, qb = quantile(z, 0.2), quantile(z, 0.8)
        for score, bundle in zip(z, made, strict=True):
            a = risk_code(score, qa, qb, 0.2, 0.8, 1.5) if masses else risk_paper(score, qa, qb)
            for y in bundle:
                A[batch.responses.index(y)] = a
    pairs = list(zip(batch, A, strict=True))
    if masses:
        return batch.result(-token_mean(batch, [[clipped(r, a, low, high) for r in y.ratios()] for y, a in pairs]), A)
    J = [clipped(sequence_ratio(y), a, low, high) for y, a in pairs if y.n]
    return batch.result(-sum(J) / max(batch.N, 1), A)


def shortest(rows, number):
    """The `number` responses with the fewest tokens; of equal ones by `shuffled`."""
    return sorted((y for y in rows if y.n), key=lambda y: (y.n, shuffled(y)))[:number]


def scaled(x):
    """(x - min)/(max - min); 0 if all are equal."""
    return [(v - min(x)) / (max(x) - min(x)) if max(x) > min(x) else 0.0 for v in x]


def median(x):
    s = sorted(x)
    return (s[(len(s) - 1) // 2] + s[len(s) // 2]) / 2


def ttpo(case, few=(4, 4), cut=1024, lam=0.1):
    """TTPO, arXiv 2608.27448, one mean over all that train; a hint is needed."""
    batch = Batch(case)
    D = divergences(batch)
    A, J, W, trained = [0.0] * batch.N, [[] for _ in batch], [[0.0] * y.n for y in batch], 0
    for group in {y.group: [batch.responses[j] for j in batch.group_of(y)] for y in batch}.values():
        label, _ = majority(sorted(a for a in map(answer_of, group) if a is not None))
        agree = [label is not None and answer_of(y) == label for y in group]
        places = [batch.responses.index(y) for y in group]
        for k, place in enumerate(places):
            A[place] = 1.0 if agree[k] else lam * z_score(1e-6, 0)([float(a) for a in agree], k)
        sides = [[y for y, a in zip(group, agree, strict=True) if a == side] for side in (True, False)]
        taken = [shortest(side, n) for side, n in zip(sides, few, strict=True)] if label is not None else []
        for y in [y for side in taken for y in side if hinted(y)]:
            place, n = batch.responses.index(y), min(y.n, cut)
            trained += 1
            H, d = scaled(y.take("entropy")[:n]), scaled(y.take("kl_teacher")[:n])
            W[place] = [float(t < n) for t in range(y.n)]
            if y in taken[0]:
                J[place] = [-(h + x - h * x) * v for h, x, v in zip(H, d, D[place], strict=False)]
                continue
            s = [-stop(lp) * (1 - h) for lp, h in zip(y.logp, H, strict=False)]
            J[place] = [A[place] * lp if x >= median(s) else 0.0 for lp, x in zip(y.logp, s, strict=False)]
    loss = -sum(sum(row) / len(row) for row in J if row) / max(trained, 1)
    return *batch.result(loss, A, W), slopes(batch, loss, D)
