"""Problems as token ids, refused before anything is sampled if the model can't take them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kenpo.engines.base import check_prompt_fits
from kenpo.errors import InputError
from kenpo.experience.problem import Problem
from kenpo.models.loading import context_length, encode_prompt, vocabulary_size


class Prompts:
    """Encodes a run's problems with the model's tokenizer and chat template."""

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
        """Encode and forget: raises what `encode` raises."""
        for problem in problems:
            self.encode(problem)
