"""What an engine takes and gives: sampling options, completions, and the protocol the trainer holds on to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kenpo.errors import InputError


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample: logits / ``temperature``, then the ``top_k`` likeliest ids (0: all), then the smallest set of mass
    ``top_p``, at most ``max_tokens`` tokens, ended by a stop string of ``stop``.

    Greedy decoding is asked of the engine (``greedy=True``), not with a temperature of 0. Raises `InputError` on a
    value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(
                f"temperature: {self.temperature} is not above 0; for greedy decoding ask for greedy instead"
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p} is outside (0, 1]; 1 keeps the whole vocabulary")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(f"top_k: {self.top_k} is not a whole number of 0 or more; 0 keeps the whole vocabulary")
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InputError(f"max_tokens: {self.max_tokens} is not a whole number of 1 or more")
        if isinstance(self.stop, str):
            raise InputError(f"stop: give a tuple of strings, ({self.stop!r},)")
        object.__setattr__(self, "stop", tuple(self.stop))
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InputError("stop: a stop string is empty, and would end every response at once")

    @property
    def truncates(self) -> bool:
        """Whether sampling is restricted to a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True)
class Completion:
    """One response as it was sampled.

    ``tokens`` include the end-of-sequence id or stop string that ended it; nothing is added that was not sampled.
    ``logp`` holds log μ of each token in nats, under temperature, top-k and top-p as they were in force. ``truncated``
    says that the limit ended it. ``support`` holds, per token, the ids that top-k / top-p kept (None: the whole
    vocabulary). ``text`` is decoded without special and end ids and is cut before the stop string. ``version`` counts
    the weights that sampled it.
    """

    tokens: list[int]
    logp: list[float]
    truncated: bool
    support: list[list[int]] | None
    text: str
    version: int


class Engine(Protocol):
    """Samples from the current weights. A sample depends on weights, prompt, seed and options alone."""

    version: int

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        greedy: bool = False,
    ) -> list[list[Completion]]:
        """For each prompt one completion per seed in ``seeds[p]``, in that order."""
        ...

    def set_weights(self, version: int) -> None:
        """From now on sample from the weights of that version."""
        ...


def check_prompt_fits(ids: Sequence[int], context: int | None, max_tokens: int, name: str = "the prompt") -> None:
    """Raises `InputError` if a prompt is empty or leaves no room for a single token.

    A response that meets the context is cut there and marked truncated; ``max_tokens`` only stands in the message.
    """
    if not ids:
        raise InputError(f"{name}: it has no tokens; a response needs at least one token before it")
    if context is not None and len(ids) + 1 > context:
        raise InputError(
            f"{name}: {len(ids)} tokens leave no room for a response (up to {max_tokens}) in the model's context of "
            f"{context}; shorten the prompt or drop the row"
        )
