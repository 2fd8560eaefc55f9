"""The time that chat templates write into prompts: one moment per process, and per run.

Some templates write today's date, some the second (``strftime_now``). Prompts must not change while a run goes on, nor
when it is resumed on another day, so a template reads the moment that `set_clock` named (default: when it was first
asked for).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

_moment: float | None = None


def set_clock(moment: float) -> None:
    """From now on templates read `moment`, in seconds since the epoch."""
    global _moment
    _moment = moment


def moment() -> float:
    """The moment that templates read."""
    global _moment
    if _moment is None:
        _moment = time.time()
    return _moment


@contextlib.contextmanager
def stopped(template: Any) -> Iterator[None]:
    """Within it a chat template's ``strftime_now`` reads `moment`; nothing is done for one that does not ask."""
    if "strftime_now" not in str(template):
        yield
        return
    from transformers.utils import chat_template_utils as rendering

    at = datetime.fromtimestamp(moment())

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return at if tz is None else at.astimezone(tz)

    kept = rendering.datetime
    rendering.datetime = Stopped  # type: ignore[misc]  # transformers passes no clock of the caller's
    try:
        yield
    finally:
        rendering.datetime = kept  # type: ignore[misc]
