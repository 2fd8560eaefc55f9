"""What samples earn: the verifier's verdicts on an engine's completions, and the record of each sample."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kenpo.engines.base import Completion
from kenpo.errors import VerifierError
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Sample, Verdict, Verifier
from kenpo.ranks import Ranks


def judge(
    verifier: Verifier, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
) -> list[list[Verdict]]:
    """A verdict per completion, in the same nesting."""
    samples = [
        Sample(completion=c.text, answer=p.answer, prompt=p.prompt, truncated=c.truncated, extra=p.extra, group=g)
        for g, (p, cs) in enumerate(zip(problems, completions, strict=True))
        for c in cs
    ]
    flat = iter(verifier.score(samples) if samples else [])
    return [[next(flat) for _ in cs] for cs in completions]


Group = tuple[int, Problem, Sequence[Completion]]


class Judge:
    """Judges groups in a thread of its own as they come, while the engine goes on sampling.

    A verdict depends on its group alone, so that what is judged together, and when, changes nothing. What the verifier
    raises is raised again by the next `put`, or by `verdicts`.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._found: dict[int, list[Verdict]] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="kenpo-judge")
        self._thread.start()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.put(None)

    def put(self, number: int, problem: Problem, completions: Sequence[Completion]) -> None:
        """Hand over group `number`."""
        if self._error is not None:
            raise self._error
        self._queue.put((number, problem, completions))

    def verdicts(self) -> dict[int, list[Verdict]]:
        """The verdicts of all groups, by their numbers; waits for the last one. Nothing can be put any more."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _work(self) -> None:
        try:
            while groups := self._take():
                verdicts = judge(self._verifier, [p for _, p, _ in groups], [cs for _, _, cs in groups])
                self._found |= {number: found for (number, _, _), found in zip(groups, verdicts, strict=True)}
        except BaseException as error:
            self._error = error

    def _take(self) -> list[Group]:
        """All groups that wait, at least one; none at the end."""
        groups: list[Group] = []
        while not groups or not self._queue.empty():
            group = self._queue.get()
            if group is None:
                self._queue.put(None)
                break
            groups.append(group)
        return groups


@contextlib.contextmanager
def all_stop(ranks: Ranks) -> Iterator[None]:
    """A verifier that gives up on one rank stops every rank, with the first message: none may wait for another."""
    message = None
    try:
        yield
    except VerifierError as error:
        message = str(error)
    told = [m for m in ranks.gather(message) if m]
    if told:
        raise VerifierError(told[0])


def describe(problem: Problem, number: int, completion: Completion, verdict: Verdict) -> dict[str, Any]:
    """One line of ``samples.jsonl``."""
    return {
        "problem": problem.id,
        "sample": number,
        "prompt": problem.prompt,
        "completion": completion.text,
        "tokens": len(completion.tokens),
        "truncated": completion.truncated,
        "reward": None if math.isnan(verdict.reward) else float(verdict.reward),
        "parts": {n: None if math.isnan(v) else float(v) for n, v in verdict.parts.items()},
        "status": verdict.status,
        "extracted": verdict.answer,
        "answer": problem.answer,
        "detail": verdict.detail,
    }
