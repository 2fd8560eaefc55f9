"""Rollouts from elsewhere that join, or take a place in, the groups that the policy sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kenpo.episode import Episode
from kenpo.experience.judge import describe
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Verdict
from kenpo.fields import ON_POLICY


@dataclass
class Member:
    """A response to a group's problem: who wrote it (``origin`` as in `Rollouts`), and what its record says further."""

    episode: Episode
    verdict: Verdict
    origin: int = ON_POLICY
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Group:
    """A problem's responses. ``place`` is the number that its samples' seeds are made of; ``aside`` holds responses
    that are recorded but train nothing: replaced failures, restatements that were refused."""

    place: int
    problem: Problem
    members: list[Member]
    aside: list[Member] = field(default_factory=list)

    def records(self) -> Iterator[dict[str, Any]]:
        """Lines of ``samples.jsonl``: the members in order, then what was put aside."""
        for number, m in enumerate((*self.members, *self.aside)):
            yield {**describe(self.problem, number, m.episode, m.verdict), **m.told}


class Mixture(Protocol):
    """Changes the groups that one rank sampled, before they become rows.

    Its record keys: ``origin`` names who wrote a response that the policy did not sample on the plain prompt;
    ``aside`` says why a response is in no row; ``further_tokens`` counts tokens sampled on the way to it.
    """

    def join(self, groups: Sequence[Group], step: int, round_: int) -> None:
        """Add members to the groups, or put others in their places."""
        ...

    def begin(self, state: Any) -> None:
        """Take up what `kept` gave after the last step; None at first."""
        return None

    def fresh(self) -> list[Any]:
        """What this rank found in this step and every rank is to keep: JSON values."""
        return []

    def kept(self, fresh: Sequence[Any]) -> Any:
        """What the next step begins with, from what all ranks found, in order."""
        return None


def is_row(record: Mapping[str, Any]) -> bool:
    """Whether the record's response stands in a row."""
    return "baseline" not in record and "aside" not in record


def is_own(record: Mapping[str, Any]) -> bool:
    """Whether the policy sampled the response on the plain prompt, as one of its group."""
    return "baseline" not in record and "origin" not in record
