"""Losses of pairs: reward model, DPO and its kin, SimPO, and the turn-level density ratio."""

from __future__ import annotations

import math

from .batch import Batch, saturate
from .scalar import Value, exp, gradients, softplus, stop


def log_sigmoid(z):
    return -softplus(-z)


def reward_model(chosen, rejected, margin=None, centering=0.0, prompt=None):
    """(loss, d/dchosen, d/drejected): mean of -log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2; with `prompt` the mean
    over prompts of the mean over their pairs."""
    w, rest = [Value(x) for x in chosen], [Value(x) for x in rejected]
    margin = margin or [0.0] * len(w)
    names = prompt or list(range(len(w)))
    loss = 0.0
    for a, b, m, name in zip(w, rest, margin, names, strict=True):
        pair = softplus(-(a - b - m)) + centering * (a + b) * (a + b)
        loss = loss + pair / names.count(name) / len(set(names))
    return stop(loss), gradients(loss, w), gradients(loss, rest)


def side(mask, logp):
    """The trained tokens of one side as Values, with their places."""
    return [(t, Value(x)) for t, (m, x) in enumerate(zip(mask, logp, strict=True)) if m]


def spread(mask, tokens, slopes):
    out = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(tokens):
        for (t, _), g in zip(row, slopes[b], strict=True):
            out[b][t] = g
    return out


def dpo(pairs: dict, beta=0.1, variant="sigmoid", label_smoothing=0.0):
    """DPO, arXiv 2305.18290: h = chosen's log-ratio to the reference minus rejected's, summed over tokens (IPO may
    divide each side by its length). Variants as in the golden numbers. Gives a dict with both sides' coefficients."""
    e, sides, margins = label_smoothing, {}, []
    for name in ("chosen", "rejected"):
        mask = pairs[f"{name}_mask"]
        sides[name] = [side(m, x) for m, x in zip(mask, pairs[f"{name}_logp"], strict=True)]
    for b in range(len(sides["chosen"])):
        ratio = {}
        for name, rows in sides.items():
            ratio[name] = sum(x - pairs[f"{name}_logp_ref"][b][t] for t, x in rows[b])
            if variant == "ipo_length_normalised":
                ratio[name] = ratio[name] / len(rows[b])
        margins.append(ratio["chosen"] - ratio["rejected"])
    losses = [_dpo_loss(h, beta, variant, e) for h in margins]
    return _pair_result(pairs, sides, losses) | {"margins": [stop(h) for h in margins]}


def _dpo_loss(h, beta, variant, e):
    if variant.startswith("ipo"):
        return (h - 1 / (2 * beta)) * (h - 1 / (2 * beta))
    forward, backward = softplus(-(beta * h)), softplus(beta * h)
    if variant == "conservative":
        return (1 - e) * forward + e * backward
    return ((1 - e) * forward - e * backward) / (1 - 2 * e) if variant == "robust" else forward


def _pair_result(pairs, sides, losses):
    loss = sum(losses) / len(losses)
    out = {"loss": stop(loss), "pair_losses": [stop(x) for x in losses]}
    for name, rows in sides.items():
        slopes = [gradients(loss, [x for _, x in row]) for row in rows]
        out[f"{name}_coefficients"] = spread(pairs[f"{name}_mask"], rows, slopes)
    return out


def simpo(pairs: dict, beta=2.0, gamma=None, gamma_beta_ratio=None):
    """SimPO, arXiv 2405.14734: -log sigmoid(z), z = beta (mean chosen logp - mean rejected logp) - gamma; or
    beta (difference - ratio)."""
    shift = gamma if gamma is not None else beta * gamma_beta_ratio
    sides = {
        name: [side(m, x) for m, x in zip(pairs[f"{name}_mask"], pairs[f"{name}_logp"], strict=True)]
        for name in ("chosen", "rejected")
    }
    means = {name: [sum(x for _, x in row) / len(row) for row in rows] for name, rows in sides.items()}
    z = [beta * (w - rest) - shift for w, rest in zip(means["chosen"], means["rejected"], strict=True)]
    return _pair_result(pairs, sides, [softplus(-x) for x in z]) | {"z": [stop(x) for x in z]}


def turn_weights(turns_ref: list[list[float]], low=0.2, high=1.0, pivot=0.9) -> list[float]:
    """low where a turn's mean token probability under the reference exceeds the pivot, else high."""
    return [low if math.exp(math.fsum(turn) / len(turn)) > pivot else high for turn in turns_ref]


def mdre(chosen, chosen_ref, rejected, rejected_ref, low=0.2, high=1.0, pivot=0.9):
    """Turn-level multiscale density ratio, arXiv 2609.16760, one pair of lists of turns of token log-probs:
    L = rl - C sum_i om_i log(pi/ref)(chosen turn i). Gives loss, C, rl and the slope of each turn's tokens."""
    w, rest = ([[Value(x) for x in turn] for turn in turns] for turns in (chosen, rejected))
    om_w, om_l = (turn_weights(ref, low, high, pivot) for ref in (chosen_ref, rejected_ref))

    def log_ratio(turns, ref, om):
        return sum(o * (sum(a) - math.fsum(b)) for o, a, b in zip(om, turns, ref, strict=True))

    rl = exp(log_ratio(rest, rejected_ref, om_l))
    C = math.exp(math.fsum((1 - o) * math.fsum(turn) for o, turn in zip(om_w, chosen_ref, strict=True)))
    weighted = log_ratio(w, chosen_ref, om_w)
    loss = rl - C * weighted
    return {
        "loss": stop(loss),
        "rl": stop(rl),
        "C": C,
        "weighted_log_ratio": stop(weighted),
        "chosen_gradient": [gradients(loss, turn)[0] for turn in w],
        "rejected_gradient": [gradients(loss, turn)[0] for turn in rest],
    }


# ---- whole batches: groups of any size, every pair whose rewards differ ----------------------------------------------


def by_groups(case: dict, pair_loss):
    """(loss, coefficients, advantages, weights) of the mean of pair_loss(better, worse) over a group's decided pairs,
    then over the groups that have one. Responses without a trained token take no part."""
    batch = Batch(case)
    losses = []
    for name in dict.fromkeys(y.group for y in batch):
        members = [y for y in batch if y.group == name and y.n]
        found = [pair_loss(a, b) for a in members for b in members if a.reward > b.reward]
        if found:
            losses.append(sum(found) / len(found))
    loss = sum(losses) / len(losses) if losses else 0.0
    return batch.result(loss, [1.0] * batch.N)


def log_ratio_to_reference(y, normalise=False):
    total = sum(x - r for x, r in zip(y.logp, y.anchor("ref"), strict=True))
    return total / y.n if normalise else total


def dpo_batch(case, beta=0.1, variant="sigmoid", label_smoothing=0.0):
    """`dpo` on groups: h = the better's minus the worse's log-ratio to the reference."""
    normalise = variant == "ipo_length_normalised"

    def pair(a, b):
        h = log_ratio_to_reference(a, normalise) - log_ratio_to_reference(b, normalise)
        return _dpo_loss(h, beta, variant, label_smoothing)

    return by_groups(case, pair)


def simpo_batch(case, beta=2.0, ratio=0.25):
    """`simpo` on groups."""
    return by_groups(case, lambda a, b: softplus(-(beta * (sum(a.logp) / a.n - sum(b.logp) / b.n - ratio))))


def reward_model_batch(case, margin=False, centering=0.0):
    """Bradley-Terry on the scores of groups, with a fifth item: d loss / d score of every row. A pair has the margin of
    its better response."""
    scores = [Value(x) for x in case["policy"]["score"]]

    def pair(a, b):
        s, t = scores[a.row], scores[b.row]
        m = case["rollouts"]["margin"][a.row] if margin else 0.0
        return softplus(-(s - t - m)) + centering * (s + t) * (s + t)

    batch = Batch(case)
    losses = []
    for name in dict.fromkeys(y.group for y in batch):
        members = [y for y in batch if y.group == name and y.n]
        found = [pair(a, b) for a in members for b in members if a.reward > b.reward]
        losses += [sum(found) / len(found)] if found else []
    loss = sum(losses) / len(losses) if losses else 0.0
    return *batch.result(loss, [1.0] * batch.N), {"score": gradients(loss, scores)}


def turns_of(y) -> dict[int, list[int]]:
    """Places (among the trained tokens) of each turn."""
    out: dict[int, list[int]] = {}
    for k, t in enumerate(y.positions):
        out.setdefault(y.case["rollouts"]["turn"][y.row][t], []).append(k)
    return out


def mdre_batch(case, low=0.2, high=1.0, pivot=0.9, chosen_factor="literal"):
    """`mdre` on groups; the exponent of the worse side is held in +-20."""

    def weighted(y):
        ref, total, left = y.anchor("ref"), 0.0, 0.0
        for places in turns_of(y).values():
            om = turn_weights([[ref[k] for k in places]], low, high, pivot)[0]
            total = total + om * (sum(y.logp[k] for k in places) - math.fsum(ref[k] for k in places))
            left += (1 - om) * math.fsum(ref[k] for k in places)
        factor = {"literal": math.exp(left), "length_normalised": math.exp(left / y.n), "one": 1.0}[chosen_factor]
        return total, factor

    def pair(a, b):
        (chosen, factor), (rejected, _) = weighted(a), weighted(b)
        return exp(saturate(rejected)) - factor * chosen

    return by_groups(case, pair)
