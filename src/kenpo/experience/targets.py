"""A prompt's valid answers and their target shares: columns ``valid`` and ``target`` of a task."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.problem import Problem

VALID, TARGET = "valid", "target"
FIELDS = frozenset({"target_ids", "target_prob"})


def targets_of(problem: Problem) -> tuple[list[str], list[float]]:
    """Valid answers as texts without blanks around them, and their shares; both empty where the problem has none."""
    valid, shares = problem.extra.get(VALID), problem.extra.get(TARGET)
    answers = [str(v).strip() for v in valid] if isinstance(valid, list | tuple) else []
    return answers, [float(x) for x in shares] if isinstance(shares, list | tuple) else []


def check_targets(problems: Iterable[Problem], needs: Collection[str], name: str) -> None:
    """InputError for the first problem that lacks what the algorithm `name` reads of valid answers."""
    if not FIELDS & set(needs):
        return
    for problem in problems:
        where = problem.place or f"problem {problem.id}"
        valid, shares = problem.extra.get(VALID), problem.extra.get(TARGET)
        if not isinstance(valid, list | tuple) or not valid:
            raise InputError(f"{where}: {name!r} reads the valid answers; give a list of them in column {VALID!r}")
        if len({str(v).strip() for v in valid}) < len(valid):
            raise InputError(f"{where}: column {VALID!r} lists an answer twice")
        if "target_prob" not in needs:
            continue
        if not _are_shares(shares, len(valid)):
            raise InputError(
                f"{where}: {name!r} reads target shares; give one for each valid answer in column {TARGET!r}, "
                "none below 0, 1 together"
            )


def _are_shares(shares: Any, number: int) -> bool:
    if not isinstance(shares, list | tuple) or len(shares) != number:
        return False
    return all(isinstance(x, int | float) and x >= 0 for x in shares) and math.isclose(sum(shares), 1, abs_tol=1e-6)
