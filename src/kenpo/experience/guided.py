"""Responses sampled under a privileged prompt and trained under the plain one (Off-Context GRPO)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kenpo.episode import Episode, given
from kenpo.errors import InputError
from kenpo.experience.hints import Hints
from kenpo.experience.problem import Problem

GUIDED = "guided"


class Guide:
    """Shows a part of each problem's hint while `rows` of its samples are drawn (None: all of them).

    ``share``: how much of the hint, counted in characters from its beginning: a solution's first part. The row that
    trains holds the plain prompt; the guided one stays beside it as the context ``guided``, under which π_old is read
    once more (``logp_guided``). Source: arXiv:2607.19313, which shows prefixes of .2 to 1 of a solution.
    """

    def __init__(self, hints: Hints, rows: int | None = None, share: float = 1.0) -> None:
        if not 0 <= share <= 1:
            raise InputError(f"--guided-share: {share} is a share of the hint and lies in [0, 1]")
        self.hints, self.rows, self.share = hints, rows, share

    def check(self, problems: Iterable[Problem]) -> None:
        """InputError for the first problem without a hint, or with one that the model can't take."""
        for problem in problems:
            self.encode(problem)

    def encode(self, problem: Problem) -> list[int]:
        """The ids of the guided prompt; with no part of the hint to show it is the plain one."""
        hint = self.hints.of_column(problem)
        shown = hint[: math.ceil(self.share * len(hint))]
        return self.hints.encode(problem, shown) if shown else self.hints.prompts.encode(problem)

    def prompt(self, problem: Problem, number: int, plain: tuple[int, ...]) -> tuple[int, ...]:
        """What sample `number` of the group is drawn under."""
        return plain if self.rows is not None and number >= self.rows else tuple(self.encode(problem))

    def off_context(self, episode: Episode, plain: list[int]) -> Episode:
        """The response after the plain prompt, the prompt that sampled it beside it; itself if that was the plain
        one."""
        if episode.prompt == plain:
            return episode
        rest = episode.segments[next(i for i, s in enumerate(episode.segments) if s.sampled) :]
        contexts = {**episode.contexts, GUIDED: episode.prompt}
        return Episode((given(plain), *rest), episode.finish, episode.text, episode.trajectory, contexts)
