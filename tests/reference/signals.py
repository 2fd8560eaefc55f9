"""Objectives on rewards that a group or a memory makes: TTRL, GAPO, MaD-RL, SPO."""

from __future__ import annotations

from .batch import Batch, clipped, dual_clipped, sequence_mean, token_mean, z_score
from .grpo_family import k3
from .outcomes import gapo_rewards, madrl_rewards, majority, spo_step


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
