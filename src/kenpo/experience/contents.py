"""The rows that a run learns from and is measured on, as plain values to be digested."""

from __future__ import annotations

from typing import Any

from kenpo.experience.demonstrations import Texts
from kenpo.experience.pairs import Pair, PairStream
from kenpo.experience.problem import Problem
from kenpo.experience.tasks import Task


def rows_of(task: Task | None, texts: Texts | None, pairs: PairStream | None) -> dict[str, list[Any]]:
    """Rows to learn from, by the name that messages give them; those of an endless task are not among them."""
    found: dict[str, list[Any]] = {}
    if texts is not None and texts.rows:
        found["demonstrations"] = [[t.prompt, t.response] for t in texts.rows]
    if pairs is not None:
        found["pairs"] = [_pair(p) for p in pairs.rows]
    if task is not None and task.ids is not None:
        found["rows of the task"] = [_row(task.problem(n)) for n in task.ids]
    return found


def held_of(
    task: Task | None, texts: Texts | None, pairs: PairStream | None, problems: int, named: bool
) -> dict[str, list[Any]]:
    """Held-out rows likewise; ``named``: a file of them was given."""
    found: dict[str, list[Any]] = {}
    if texts is not None and texts.rows:
        found["held-out demonstrations"] = [[t.prompt, t.response] for t in texts.heldout]
    if pairs is not None:
        found["held-out pairs"] = [_pair(p) for p in pairs.heldout]
    if task is not None and problems and (task.ids is not None or named):
        found["held-out rows"] = [_row(p) for p in task.heldout(problems)]
    return found


def _row(problem: Problem) -> list[Any]:
    return [problem.prompt, problem.answer, dict(problem.extra)]


def _pair(pair: Pair) -> list[Any]:
    return [pair.prompt, pair.chosen, pair.rejected, pair.margin]
