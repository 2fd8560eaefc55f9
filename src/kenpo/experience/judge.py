"""What samples earn: the verifier's verdicts on sampled episodes, and the record of each sample."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kenpo.engines.base import Engine, Request
from kenpo.episode import Episode
from kenpo.errors import VerifierError
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Sample, Verdict, Verifier
from kenpo.ranks import Ranks


def judge(verifier: Verifier, problems: Sequence[Problem], groups: Sequence[Sequence[Episode]]) -> list[list[Verdict]]:
    """A verdict per episode, in the same nesting; each group answers the problem at its place."""
    samples = [
        Sample(completion=e.text, answer=p.answer, prompt=p.prompt, truncated=e.truncated, extra=p.extra, group=g)
        for g, (p, episodes) in enumerate(zip(problems, groups, strict=True))
        for e in episodes
    ]
    flat = iter(verifier.score(samples) if samples else [])
    return [[next(flat) for _ in episodes] for episodes in groups]


Group = tuple[int, Problem, Sequence[Episode]]


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

    def put(self, number: int, problem: Problem, episodes: Sequence[Episode]) -> None:
        """Hand over group `number`."""
        if self._error is not None:
            raise self._error
        self._queue.put((number, problem, episodes))

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
                verdicts = judge(self._verifier, [p for _, p, _ in groups], [es for _, _, es in groups])
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


def sample_groups(
    engine: Engine, judge: Judge, asked: Mapping[int, tuple[Problem, Sequence[Request]]]
) -> dict[int, list[Episode]]:
    """The episodes of each group, by its number; a group goes to the judge once all of its episodes have ended."""
    owners = [(g, j) for g, (_, requests) in asked.items() for j in range(len(requests))]
    ended: dict[int, dict[int, Episode]] = {g: {} for g in asked}

    def done(place: int, episode: Episode) -> None:
        group, number = owners[place]
        ended[group][number] = episode
        if len(ended[group]) == len(asked[group][1]):
            judge.put(group, asked[group][0], [ended[group][j] for j in range(len(ended[group]))])

    engine.sample([r for _, requests in asked.values() for r in requests], done)
    return {g: [found[j] for j in range(len(found))] for g, found in ended.items()}


def describe(problem: Problem, number: int, episode: Episode, verdict: Verdict) -> dict[str, Any]:
    """One line of ``samples.jsonl``."""
    return {
        "problem": problem.id,
        "sample": number,
        "prompt": problem.prompt,
        "completion": episode.text,
        "tokens": len(episode.tokens),
        "truncated": episode.truncated,
        "reward": None if math.isnan(verdict.reward) else float(verdict.reward),
        "parts": {n: None if math.isnan(v) else float(v) for n, v in verdict.parts.items()},
        "status": verdict.status,
        "extracted": verdict.answer,
        "answer": problem.answer,
        "detail": verdict.detail,
    }
