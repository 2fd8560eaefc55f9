"""What was sampled, before it becomes rows: segments of tokens that were given or sampled, and how they ended."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kenpo.errors import InputError

FINISHES = ("stop", "length", "abort")


@dataclass(frozen=True)
class Segment:
    """Tokens in a row that were all given, or all sampled by one set of weights.

    ``logp`` holds log μ of each sampled token in nats, under the temperature, top-k and top-p in force; ``version``
    counts the weights that sampled; ``turn`` numbers the turns of a dialogue. ``support``: per token the ids that
    top-k and top-p kept (None: the whole vocabulary); ``top_ids`` and ``top_logp``: per token the K likeliest ids and
    their log μ; ``routes`` [n,L,K]: the experts chosen. An engine whose weights change within a response starts a new
    segment. Raises `InputError` if what is said of the tokens does not count as many as there are.
    """

    ids: Sequence[int]
    sampled: bool = False
    logp: Sequence[float] | None = None
    version: int = -1
    turn: int = 0
    support: Sequence[Sequence[int]] | None = None
    top_ids: Sequence[Sequence[int]] | None = None
    top_logp: Sequence[Sequence[float]] | None = None
    routes: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("logp", "support", "top_ids", "top_logp", "routes"):
            said = getattr(self, name)
            if said is not None and len(said) != len(self.ids):
                raise InputError(
                    f"segment: {name} speaks of {len(said)} token(s), the segment has {len(self.ids)}; "
                    "an engine gives one entry for every token that it sampled"
                )


def given(ids: Sequence[int], turn: int = 0) -> Segment:
    """Tokens that the policy did not sample: a prompt, or what a tool answered."""
    return Segment(ids, turn=turn)


@dataclass(frozen=True)
class Episode:
    """A prompt and what followed. Prompt and completion is the shortest; dialogues have more segments.

    ``finish`` says how it ended: ``stop`` (an end id or stop string, itself sampled), ``length`` or ``abort``. ``text``
    is what was sampled last, decoded without special and end ids and cut before a stop string. Rows of one dialogue
    share a ``trajectory`` number. ``contexts`` are other prompts for the same response, by name (``plain``, ``guided``,
    ``hint``). Raises `InputError` for an unknown finish, or if the first segment was sampled: a response needs a token
    before it.
    """

    segments: tuple[Segment, ...]
    finish: str = "stop"
    text: str = ""
    trajectory: int = -1
    contexts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.finish not in FINISHES:
            raise InputError(f"episode: finish {self.finish!r} is none of {', '.join(FINISHES)}")
        first = next((s for s in self.segments if len(s.ids)), None)
        if first is None or first.sampled:
            raise InputError("episode: the first token was sampled; a response needs at least one token before it")

    @property
    def prompt(self) -> list[int]:
        """All ids before the first sampled one."""
        ids: list[int] = []
        for segment in self.segments:
            if segment.sampled:
                break
            ids += segment.ids
        return ids

    @functools.cached_property
    def prompt_key(self) -> int:
        """The identity of the prompt's tokens, found once: equal for equal prompts, the same on every machine."""
        return prompt_key(self.prompt)

    @property
    def sampled(self) -> list[Segment]:
        """The segments that were sampled."""
        return [s for s in self.segments if s.sampled]

    @property
    def tokens(self) -> list[int]:
        """The sampled ids."""
        return [i for s in self.sampled for i in s.ids]

    @property
    def logp(self) -> list[float]:
        """log μ of the sampled ids; empty where the sampler did not say."""
        return [x for s in self.sampled for x in s.logp or ()]

    @property
    def support(self) -> list[Sequence[int]] | None:
        """Kept ids of every sampled token; None where nothing was cut."""
        return [ids for s in self.sampled for ids in s.support or ()] or None

    @property
    def truncated(self) -> bool:
        """Whether anything but the policy ended it."""
        return self.finish != "stop"

    @property
    def version(self) -> int:
        """The oldest weights that sampled a part of it; -1 if none is known."""
        return min((s.version for s in self.sampled), default=-1)


def prompt_key(ids: Iterable[int]) -> int:
    """63 bits that stand for a prompt's tokens."""
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
