"""Problems as token ids, refused before anything is sampled if the model can't take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kenpo.engines.base import check_prompt_fits
from kenpo.errors import InputError, TooLongError
from kenpo.experience.problem import Problem
from kenpo.models.loading import context_length, encode_prompt, vocabulary_size
from kenpo.models.templates import rendered_already


class Prompts:
    """Encodes a run's problems with the model's tokenizer and chat template. ``notes``: what the user should know."""

    notes: Sequence[str] = ()

    def __init__(self, model: Any, tokenizer: Any, system: str | None, max_tokens: int) -> None:
        self.tokenizer, self.system, self.max_tokens = tokenizer, system, max_tokens
        self.context, self.vocabulary = context_length(model), vocabulary_size(model)

    def encode(self, problem: Problem) -> list[int]:
        """The problem's prompt ids. InputError, naming the problem, if they are none or exceed the model's context."""
        name = f"{problem.place}: the prompt" if problem.place else f"the prompt of problem {problem.id}"
        try:
            ids = encode_prompt(self.tokenizer, problem.prompt, self.system)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        if max(ids) >= self.vocabulary:
            raise InputError(
                f"{name}: id {max(ids)} is outside the model's vocabulary of {self.vocabulary}; the tokenizer has more "
                "ids than the model's embedding has rows"
            )
        check_prompt_fits(ids, self.context, self.max_tokens, name)
        return ids

    def check(self, problems: Iterable[Problem]) -> None:
        """Encode and forget: raises what `encode` raises. `notes` tells of prompts that look rendered already."""
        marks: list[tuple[Problem, str]] = []
        for problem in problems:
            self.encode(problem)
            if token := rendered_already(self.tokenizer, problem.prompt):
                marks.append((problem, token))
        if marks:
            first, token = marks[0]
            where = first.place or f"problem {first.id}"
            self.notes = (
                f"{where}: the prompt holds {token}, as if a chat template had been applied to it already "
                f"({len(marks)} prompts do), and the model's is applied once more; leave it out: --template none",
            )

    def too_long(self, problem: Problem) -> bool:
        """Whether the prompt leaves no room for a response in the model's context. InputError for any other fault."""
        try:
            self.encode(problem)
        except TooLongError:
            return True
        return False
