"""A problem: what the policy is asked and what its verifier is handed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One data row: what the policy is asked and what its verifier is handed.

    `id` is the identity of the row, not of its text: two rows with the same prompt are two problems. `prompt` is plain
    text or a list of chat messages; `answer` is a JSON value, a list of them if any counts; `extra` holds the row's
    other columns; `place` says in messages where the row stands ("test.jsonl: line 3"). `set` names
    the held-out set that it belongs to, where there are several.
    """

    id: int
    prompt: Prompt
    answer: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)
    set: str = field(default="", compare=False)
