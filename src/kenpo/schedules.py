"""Numbers of an algorithm that change along a run: ``ratio.p=1:0@200`` goes from 1 to 0 over 200 steps, then stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kenpo.algorithm import Algorithm
from kenpo.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """The number `key` of an algorithm, linear from `start` (at step 0, the first batch) to `end` (from `steps` on)."""

    key: str
    start: float
    end: float
    steps: int

    def value(self, step: int) -> float:
        """The number in force at a step; exactly `start` and `end` at the ends.

        >>> [Schedule("ratio.p", 1.0, 0.0, 4).value(s) for s in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
        """
        done = min(max(step, 0) / self.steps, 1.0)
        return self.end if done == 1.0 else self.start + (self.end - self.start) * done

    def __str__(self) -> str:
        return f"{self.key}={self.start:g}:{self.end:g}@{self.steps}"


def parse(text: str) -> Schedule:
    """``KEY=FROM:TO@STEPS`` as a `Schedule`. Raises `InputError` that says what is wrong.

    >>> parse("ratio.p=1:0@200")
    Schedule(key='ratio.p', start=1.0, end=0.0, steps=200)
    """
    key, equals, rest = text.partition("=")
    span, at, steps = rest.rpartition("@")
    first, colon, last = span.partition(":")
    try:
        if not (key.strip() and equals and at and colon):
            raise ValueError
        found = Schedule(key.strip(), float(first), float(last), int(steps))
    except ValueError:
        raise InputError(f"schedule {text!r}: expected KEY=FROM:TO@STEPS, e.g. ratio.p=1:0@200") from None
    if not (math.isfinite(found.start) and math.isfinite(found.end)):
        raise InputError(f"schedule {text!r}: FROM and TO are finite numbers")
    if found.steps < 1:
        raise InputError(f"schedule {text!r}: STEPS counts at least 1")
    return found


def check(a: Algorithm, schedules: Sequence[Schedule]) -> None:
    """Raise unless each schedule moves a number of `a` over values that its stage takes.

    `UnknownNameError` for a key that names nothing; `InputError` for one that is no number, for a whole number (which
    can't move in fractions), for a key that is scheduled twice, and where the fields that the stages read would change
    along the way, for which no one plan would do.
    """
    keys = [s.key for s in schedules]
    if twice := sorted({k for k in keys if keys.count(k) > 1}):
        raise InputError(f"schedule of {twice[0]!r}: given twice")
    for schedule in schedules:
        here = f"schedule {schedule}"
        between = schedule.start + (schedule.end - schedule.start) * 0.381966
        made = []
        for value in (schedule.start, between, schedule.end):
            try:
                made.append(a.with_settings({schedule.key: value}))
            except InputError as error:
                raise type(error)(f"{here}: {error}") from None
        if len({x.needs for x in made}) > 1 or len({x.two_phase() for x in made}) > 1:
            raise InputError(f"{here}: what the stages read changes along the way; let it end short of that value")


def values(schedules: Sequence[Schedule], step: int) -> dict[str, float]:
    """The numbers in force at a step, by key: what a run records."""
    return {s.key: s.value(step) for s in schedules}


def at_step(a: Algorithm, schedules: Sequence[Schedule], step: int) -> Algorithm:
    """The algorithm in force at a step: `a` itself where nothing is scheduled. Nothing is remembered between calls."""
    return a.with_settings(values(schedules, step)) if schedules else a
