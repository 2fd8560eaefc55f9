"""Figures of a sampled evaluation: avg@k, maj@k and pass@k, each with its 95 % interval over problems."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kenpo.errors import InputError

Z95 = 1.959963984540054  # the normal distribution's 97.5 % quantile


class Estimate(NamedTuple):
    """A mean over ``problems`` problems and its 95 % interval [``low``, ``high``]."""

    mean: float
    low: float
    high: float
    problems: int


class Judged(NamedTuple):
    """One sample with a verdict: whether it is correct, and the answer that its verifier found (None: none)."""

    correct: bool
    answer: str | None


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them correct, hold a correct one: 1 − C(n−c, k) / C(n, k). InputError if k > n.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.

    >>> pass_at_k(4, 2, 2)
    0.8333333333333334
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise InputError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def estimate(values: Sequence[float], samples: int = 1) -> Estimate | None:
    """The mean of one value in [0, 1] per problem, with Wilson's 95 % score interval; None without problems.

    With m = mean and v = population variance of the n values, the interval is Wilson's for a share of m among
    ``n_eff = m (1 − m) / (v / n)`` independent trials, at least n and at most n times ``samples`` (drawn per problem).
    Values of 0 and 1 alone give n_eff = n, which is Wilson's interval itself (Wilson 1927); it stays inside [0, 1] and
    is not empty where all problems agree. Problems count as drawn independently; the samples of one problem do not. The
    effective number is our reading.

    >>> [round(x, 4) for x in estimate([1.0] * 8 + [0.0] * 2)[:3]]
    [0.8, 0.4902, 0.9433]
    """
    n = len(values)
    if not n:
        return None
    m = math.fsum(values) / n
    variance = math.fsum((x - m) ** 2 for x in values) / n
    spread, most = m * (1 - m), n * samples
    trials = float(n) if spread <= 0 else min(spread / (variance / n), most) if variance > 0 else most
    trials = max(trials, n)
    scale = 1 + Z95**2 / trials
    centre = (m + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(max(spread, 0.0) / trials + Z95**2 / (4 * trials**2))
    return Estimate(m, max(0.0, centre - half), min(1.0, centre + half), n)


def majority(samples: Sequence[Judged]) -> float:
    """Share of correct samples among those that gave the commonest answer; 0 where no sample gave one.

    Answers are one where their texts are equal; a sample without an answer does not vote. Answers that are equally
    common share alike, so that the order of samples does not matter.

    >>> majority([Judged(True, "4"), Judged(False, "5"), Judged(True, "4"), Judged(False, None)])
    1.0
    """
    votes: dict[str, list[bool]] = {}
    for sample in samples:
        if sample.answer is not None:
            votes.setdefault(sample.answer.strip(), []).append(sample.correct)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    shares = [sum(v) / len(v) for v in votes.values() if len(v) == most]
    return math.fsum(shares) / len(shares)


def by_problem(records: Iterable[Mapping[str, Any]], problems: int, correct_at: float) -> list[list[Judged]]:
    """The judged samples of each problem, in order. ``records`` are those of `Evaluator.run`."""
    found: list[list[Judged]] = [[] for _ in range(problems)]
    for r in sorted(records, key=lambda r: (r["index"], r["sample"])):
        if r["reward"] is not None:
            found[r["index"]].append(Judged(r["reward"] >= correct_at, r["extracted"]))
    return found


def average_at(groups: Sequence[Sequence[Judged]], samples: int) -> Estimate | None:
    """avg@k: each problem's share of correct samples, over problems with a judged sample."""
    return estimate([sum(s.correct for s in g) / len(g) for g in groups if g], samples)


def pass_at(groups: Sequence[Sequence[Judged]], k: int, samples: int) -> Estimate | None:
    """pass@k without bias, over problems with at least k judged samples."""
    found = [pass_at_k(len(g), sum(s.correct for s in g), k) for g in groups if len(g) >= k]
    return estimate(found, samples)


def majority_at(groups: Sequence[Sequence[Judged]], k: int) -> Estimate | None:
    """maj@k: `majority` of each problem's first k judged samples, over problems that have k; None where the verifier
    names no answers at all."""
    if not any(s.answer is not None for g in groups for s in g):
        return None
    return estimate([majority(g[:k]) for g in groups if len(g) >= k])
