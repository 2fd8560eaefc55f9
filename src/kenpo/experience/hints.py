"""Hints: what a teacher is shown beside the problem, while the policy that answers is not.

A hint stands in a column of the task, or is what another sample of the group found. The hinted prompt is a named
context of the episode (`kenpo.contexts`): sampling never sees it, scoring may ask for it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kenpo.contexts import HINT
from kenpo.episode import Episode
from kenpo.errors import InputError
from kenpo.experience.episode import answer_id
from kenpo.experience.problem import Problem, Prompt
from kenpo.experience.prompts import Prompts
from kenpo.experience.verdict import Verdict

TEMPLATE = "{prompt}\n\nA correct solution:\n\n{hint}\n\nNow solve the problem yourself."
_THOUGHT = "</think>"


@dataclass(frozen=True)
class HintOptions:
    """``column`` holds the hint; None: it is the group's first *other* response of reward at least ``threshold``, with
    a think block taken off; a lone success gets none; ``majority``: it is the answer that most of the group gave, of
    equally frequent ones that of the smallest identity. ``template`` places ``{prompt}`` and ``{hint}`` in one text."""

    column: str | None = None
    threshold: float = 0.5
    template: str = TEMPLATE
    majority: bool = False

    def __post_init__(self) -> None:
        for field in ("{prompt}", "{hint}"):
            if self.template.count(field) != 1:
                raise InputError(f"--hint-template: {field} must stand in it once, got {self.template!r}")


class Hints:
    """Puts hinted prompts beside sampled episodes."""

    def __init__(self, prompts: Prompts, options: HintOptions) -> None:
        self.prompts, self.options = prompts, options

    def check(self, problems: Sequence[Problem]) -> None:
        """InputError for the first problem without a hint in its column, or with one that the model can't take."""
        if self.options.column is not None:
            for problem in problems:
                self.encode(problem, self.of_column(problem))

    def of_column(self, problem: Problem) -> str:
        """The problem's own hint. InputError, naming the problem, if there is none."""
        value = problem.extra.get(self.options.column or "")
        if value is None or not str(value).strip():
            where = problem.place or f"problem {problem.id}"
            held = ", ".join(sorted(problem.extra)) or "none"
            raise InputError(
                f"{where}: no hint in column {self.options.column!r} (further columns: {held}); name the one that "
                "holds it with --hint-column"
            )
        return str(value)

    def encode(self, problem: Problem, hint: str) -> list[int]:
        """The ids of the hinted prompt."""
        return self.prompts.encode(dataclasses.replace(problem, prompt=hinted(problem.prompt, hint, self.options)))

    def beside(self, problem: Problem, episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[Episode]:
        """One group's episodes, each with the hinted prompt as a context if there is a hint for it, and room in the
        model's context for both that prompt and the response."""
        made = []
        for i, episode in enumerate(episodes):
            if self.options.column is not None:
                text: str | None = self.of_column(problem)
            elif self.options.majority:
                text = most_frequent([v.answer for v in verdicts])
            else:
                text = self._of_peers(i, episodes, verdicts)
            ids = [] if text is None else self.encode(problem, text)
            after = sum(len(s.ids) for s in episode.segments) - len(episode.prompt)
            if ids and (self.prompts.context is None or len(ids) + after <= self.prompts.context):
                episode = dataclasses.replace(episode, contexts={**episode.contexts, HINT: ids})
            made.append(episode)
        return made

    def _of_peers(self, own: int, episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> str | None:
        for i, (episode, verdict) in enumerate(zip(episodes, verdicts, strict=True)):
            if i != own and verdict.reward >= self.options.threshold:
                return episode.text.rpartition(_THOUGHT)[2].strip()
        return None


def most_frequent(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, of equally frequent ones that of the smallest identity; None: nobody answered.

    >>> most_frequent(["7", None, "7", "8"])
    '7'
    """
    counts = Counter(a for a in answers if a is not None)
    return min(counts, key=lambda a: (-counts[a], answer_id(a)), default=None)


class HintedPrompts(Prompts):
    """Encodes problems as the teacher reads them, each with the hint of its column."""

    def __init__(self, hints: Hints) -> None:
        plain = hints.prompts
        self.hints, self.tokenizer, self.system, self.max_tokens = (
            hints,
            plain.tokenizer,
            plain.system,
            plain.max_tokens,
        )
        self.context, self.vocabulary = plain.context, plain.vocabulary

    def encode(self, problem: Problem) -> list[int]:
        return self.hints.encode(problem, self.hints.of_column(problem))


def hinted(prompt: Prompt, hint: str, options: HintOptions) -> Prompt:
    """The prompt with the hint in it; of a conversation, in its last message."""
    if isinstance(prompt, str):
        return _fill(options.template, prompt, hint)
    *before, last = [dict[str, Any](m) for m in prompt]
    return [*before, {**last, "content": _fill(options.template, str(last.get("content", "")), hint)}]


def _fill(template: str, prompt: str, hint: str) -> str:
    """Both texts put in at once: braces in one of them mean nothing."""
    head, _, rest = template.partition("{prompt}")
    if "{hint}" in head:
        first, _, middle = head.partition("{hint}")
        return f"{first}{hint}{middle}{prompt}{rest}"
    middle, _, end = rest.partition("{hint}")
    return f"{head}{prompt}{middle}{hint}{end}"
