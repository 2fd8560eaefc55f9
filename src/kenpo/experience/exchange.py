"""Which responses change places between groups or models: the rules of RePO and GRAFT, on numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kenpo.errors import InputError


def replaced(
    rewards: Sequence[float], rephrased: float | None, *, delta: float = 0.5, rho: float = 0.75, truncated: bool = False
) -> int | None:
    """The place in a group whose response the rephrased answer takes, or None.

    The lowest reward goes (the first of equals), if at least a share `rho` of the group's rewards is below `delta`, and
    if the rephrased answer has a verdict, ended by itself and is better. A group without a verdict for some response
    is judged by the others. Source: RePO, arXiv:2602.10819; delta, rho and the last two conditions are ours.

    >>> replaced([1.0, 0.0, 0.0, 0.0], 1.0), replaced([1.0, 1.0, 0.0, 0.0], 1.0)
    (1, None)
    """
    if not 0 <= rho <= 1:
        raise InputError(f"rho: {rho} is a share of the group and lies in [0, 1]")
    judged = [k for k, r in enumerate(rewards) if not math.isnan(r)]
    if rephrased is None or math.isnan(rephrased) or truncated or not judged:
        return None
    failures = sum(rewards[k] < delta for k in judged)
    worst = min(judged, key=lambda k: rewards[k])
    return worst if failures >= rho * len(judged) and rephrased > rewards[worst] else None


def exchanged(samples: int, correct_a: Sequence[int], correct_b: Sequence[int]) -> tuple[list[int], list[int]]:
    """(prompts whose group goes from B to A, from A to B), in order.

    A model gets the other's whole group where it solved the prompt in none of its `samples` and the other in some, not
    all. The longer side is cut to the length of the shorter, most successes of the source first; ties at the cut stay,
    so a direction may exceed it. Source: GRAFT, arXiv:2609.37868.

    >>> exchanged(4, [0, 2, 1], [3, 0, 0])
    ([0], [1])
    """
    if len(correct_a) != len(correct_b):
        raise InputError(f"correct: {len(correct_a)} prompts for one model, {len(correct_b)} for the other")
    sides = []
    for receiver, source in ((correct_a, correct_b), (correct_b, correct_a)):
        sides.append({k: s for k, (r, s) in enumerate(zip(receiver, source, strict=True)) if r == 0 < s < samples})
    shortest = min(map(len, sides))
    return _cut(sides[0], shortest), _cut(sides[1], shortest)


def _cut(successes: dict[int, int], keep: int) -> list[int]:
    """The prompts with the most successes, `keep` of them and those tied with the last."""
    if not keep:
        return []
    least = sorted(successes.values(), reverse=True)[keep - 1]
    return [k for k, s in successes.items() if s >= least]
