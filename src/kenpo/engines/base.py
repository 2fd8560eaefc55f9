"""What an engine takes and gives: requests, episodes, and the protocol the trainer holds on to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from kenpo.episode import Episode
from kenpo.errors import InputError, TooLongError


@dataclass(frozen=True)
class SamplingOptions:
    """How to sample: logits / ``temperature``, then the ``top_k`` likeliest ids (0: all), then the smallest set of mass
    ``top_p``, at most ``max_tokens`` tokens, ended by a stop string of ``stop``. ``keep_special``: the text keeps its
    special tokens. ``top_logprobs``: how many of the likeliest ids are recorded at each token with their log-probs.

    Greedy decoding is asked for with ``Request.greedy``, not with a temperature of 0. Raises `InputError` on a
    value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    keep_special: bool = False
    top_logprobs: int = 0

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
class Request:
    """One sample that is wanted: the prompt's ids, a seed, and how to sample.

    ``greedy`` takes the likeliest token at each step; the seed, top-k and top-p then have no effect.
    """

    prompt: tuple[int, ...]
    seed: int = 0
    options: SamplingOptions = field(default_factory=SamplingOptions)
    greedy: bool = False


Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""The trained weights as a stream of (name, whole tensor), made when an engine asks for it."""

Done = Callable[[int, Episode], None]
"""Is told of each episode that has ended, with its request's place."""


class Engine(Protocol):
    """Samples episodes; a context manager. A sample depends on weights, prompt, seed and options alone.

    ``version`` counts the weights in force. Every sampled segment is stamped with the version that sampled it. A class
    may derive from this one and inherit what does nothing.
    """

    version: int

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        """One episode per request, in order; greedy and sampled ones may stand together.

        ``done(i, episode)`` is called once for every request, as soon as its episode has ended, while others still
        run; what it raises ends the sampling.
        """
        ...

    def update(self, weights: Weights, version: int) -> None:
        """From now on sample from these weights. An engine that shares the trained module need not read them."""
        ...

    def state(self) -> Any:
        """What a resumed run needs besides the weights: nested dicts and lists of JSON values and tensors, or None."""
        return None

    def load(self, state: Any) -> None:
        """Take up what `state` gave, after `update` has handed over the weights."""
        return None

    def abort(self) -> None:
        """End what is being sampled; those episodes finish as ``abort``."""
        return None

    def close(self) -> None:
        """Give processes and memory back."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@runtime_checkable
class AsynchronousEngine(Engine, Protocol):
    """An engine that samples while others train."""

    def submit(self, requests: Sequence[Request]) -> list[Future[Episode]]:
        """A handle per request, at once."""
        ...


def check_prompt_fits(ids: Sequence[int], context: int | None, max_tokens: int, name: str = "the prompt") -> None:
    """Raises `InputError` if a prompt is empty or leaves no room for a single token.

    A response that meets the context is cut there and marked truncated; ``max_tokens`` only stands in the message.
    """
    if not ids:
        raise InputError(f"{name}: it has no tokens; a response needs at least one token before it")
    if context is not None and len(ids) + 1 > context:
        raise TooLongError(
            f"{name}: {len(ids)} tokens leave no room for a response (up to {max_tokens}) in the model's context of "
            f"{context}; shorten the prompt, drop the row, or leave such rows out (--long-prompts skip)"
        )
