"""Figures of several samples per problem, by counting: averages, votes, subsets, and Wilson's interval as roots."""

from __future__ import annotations

from itertools import combinations

Z = 1.959963984540054


def share(flags: list[bool]) -> float:
    """Correct samples over samples."""
    return sum(1 for flag in flags if flag) / len(flags)


def passes(flags: list[bool], k: int) -> float:
    """Share of the k-subsets that hold a correct sample."""
    subsets = list(combinations(flags, k))
    return sum(1 for subset in subsets if any(subset)) / len(subsets)


def vote(samples: list[tuple[bool, str | None]]) -> float:
    """Correctness of the commonest answer; the mean over those that are equally common; 0 without answers."""
    answers = [answer for _, answer in samples if answer is not None]
    if not answers:
        return 0.0
    most = max(answers.count(answer) for answer in answers)
    winners = sorted({answer for answer in answers if answers.count(answer) == most})
    return sum(share([right for right, answer in samples if answer == w]) for w in winners) / len(winners)


def interval(values: list[float], samples: int) -> tuple[float, float, float]:
    """(mean, low, high): the p with (mean - p)^2 = Z^2 p (1 - p) / trials, found by halving.

    trials: mean (1 - mean) over the variance of the mean, held between the problems and all samples.
    """
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / n
    if mean in (0.0, 1.0):
        trials = n
    elif variance == 0:
        trials = n * samples
    else:
        trials = min(max(n * mean * (1 - mean) / variance, n), n * samples)

    def outside(p: float) -> bool:
        return (mean - p) ** 2 > Z * Z * p * (1 - p) / trials

    low, high = halve(outside, 0.0, mean), 1 - halve(lambda q: outside(1 - q), 0.0, 1 - mean)
    return mean, low, high


def halve(outside, left: float, right: float) -> float:
    """Where `outside` turns false between left and right."""
    if not outside(left):
        return left
    for _ in range(200):
        middle = (left + right) / 2
        left, right = (middle, right) if outside(middle) else (left, middle)
    return right
