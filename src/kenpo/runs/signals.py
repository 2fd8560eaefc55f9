"""Asking a run to stop: SIGINT and SIGTERM act after a whole step."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kenpo.errors import RunError


class Interrupted(RunError):
    """A run that was asked to stop and did so after a whole step."""

    def __init__(self, number: int, path: Path, step: int) -> None:
        super().__init__(
            f"stopped after step {step} by {signal.Signals(number).name}; go on with: kenpo train --resume {path}"
        )
        self.exit_status = 128 + number


class Asked:
    """Whether a signal asked for a stop: its number, else 0."""

    number = 0

    @contextlib.contextmanager
    def listening(self, tell: bool) -> Iterator[None]:
        """SIGINT and SIGTERM ask for a stop after the step; a second one acts at once. ``tell``: say so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _frame: Any) -> None:
            signal.signal(number, before[number])
            self.number = number
            if tell:
                print("stopping after this step; once more to stop at once", file=sys.stderr)

        before: dict[int, Any] = {int(n): signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
