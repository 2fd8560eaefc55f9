"""Several verifiers as one: each a named part, the weighted sum the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.verdict import Base, Sample, Verdict, Verifier


def read_weight(item: str) -> tuple[str, float | None]:
    """`a.py:f=0.2` as ("a.py:f", 0.2); without `=NUMBER` the weight is None. InputError for NaN or infinity.

    >>> read_weight("b.py:g=0.2"), read_weight("runs/lr=1/b.py:g")
    (('b.py:g', 0.2), ('runs/lr=1/b.py:g', None))
    """
    spec, equals, text = item.rpartition("=")
    try:
        weight = float(text) if equals else math.nan
    except ValueError:
        return item, None
    if not equals:
        return item, None
    if not spec or not math.isfinite(weight):
        raise InputError(f"verifier {item}: a weight is a finite number after a verifier, as in numeric=0.5")
    return spec, weight


def part_names(specs: Sequence[str]) -> list[str]:
    """What the parts are called: the function's name or the built-in one; with the file's where two are alike.

    InputError if two are still the same.
    """
    short = ["model" if spec.startswith("model:") else spec.rpartition(":")[2] for spec in specs]
    long = [f"{_stem(spec)}.{name}" if ":" in spec else name for spec, name in zip(specs, short, strict=True)]
    names = [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"verifier: two parts would be called {name!r}; give the function another name")
    return names


def _stem(spec: str) -> str:
    if spec.startswith("model:"):
        return spec.rstrip("/").rpartition("/")[2]
    return spec.rpartition(":")[0].replace("\\", "/").rpartition("/")[2].removesuffix(".py")


class Weighted(Base):
    """The sum of weight x reward over the parts that judge a sample.

    A part that abstains (None, NaN) on all samples of a group is left out of that group's sums: it does not speak of
    this problem. One that judges some sample of a group is needed for all of it, as sums with and without it can't be
    compared: a sample that lacks it has no verdict. A part that fails (an error, a time-out) leaves its sample without
    a verdict. So does a sample whose parts all abstain. Parts of weight 0 are recorded and never needed.
    """

    def __init__(self, parts: Sequence[Verifier], names: Sequence[str], weights: Sequence[float], name: str) -> None:
        self.parts, self.names, self.weights, self.name = list(parts), list(names), list(weights), name

    def close(self) -> None:
        """End the worker processes of all parts."""
        for part in self.parts:
            part.close()

    def processes(self) -> list[int]:
        """Process ids of the live workers of all parts."""
        return [pid for part in self.parts for pid in getattr(part, "processes", list)()]

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given."""
        columns = [part.score(samples) for part in self.parts]
        groups = [i if s.group is None else ("group", s.group) for i, s in enumerate(samples)]
        needed: set[tuple[Any, int]] = {
            (groups[i], p)
            for p, verdicts in enumerate(columns)
            for i, verdict in enumerate(verdicts)
            if verdict.status != "abstain" and self.weights[p]
        }
        return [
            self._sum([verdicts[i] for verdicts in columns], [(groups[i], p) in needed for p in range(len(columns))])
            for i in range(len(samples))
        ]

    def _sum(self, verdicts: Sequence[Verdict], needed: Sequence[bool]) -> Verdict:
        parts = {
            name: value
            for own, v in zip(self.names, verdicts, strict=True)
            for name, value in [(own, v.reward), *((f"{own}.{k}", x) for k, x in v.parts.items())]
        }
        answer = next((v.answer for v in verdicts if v.answer is not None), None)
        for name, verdict, wanted in zip(self.names, verdicts, needed, strict=True):
            if wanted and verdict.status != "ok":
                return Verdict(math.nan, verdict.status, answer, f"{name}: {verdict.detail}", parts)
        judged = [w * v.reward for w, v, use in zip(self.weights, verdicts, needed, strict=True) if use]
        if not judged:
            return Verdict(math.nan, "abstain", answer, "no part judged it", parts)
        details = [f"{n}: {v.detail}" for n, v in zip(self.names, verdicts, strict=True) if v.detail]
        return Verdict(math.fsum(judged), "ok", answer, "; ".join(details), parts)
