"""One worker process as the pool sees it: its pipes, what its supervisor reports, and its certain end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kenpo.experience import sandbox as boxes
from kenpo.experience.supervisor import MOST_PROCESSES, end_descendants

_ANSWER_BYTES = 16 << 20  # a longer answer is a broken worker
_CHUNK = 1 << 16
_MARK = "KENPO_WORKER"  # in the environment of all that a worker starts
_numbers = itertools.count()


class Process:
    """A supervisor and its child, which runs the verifier's code.

    `task` is the index of the call it works on, `since` when it got it. `ended` is the child's wait status once its
    supervisor has told it, `reason` why Kenpo itself ended it.
    """

    def __init__(self, setup: Mapping[str, Any], *, sandbox: bool) -> None:
        self.number = next(_numbers)
        self.ready, self.broken = False, False
        self.facts: dict[str, Any] = {}
        self.task: int | None = None
        self.pid: int | None = None
        self.ended: int | None = None
        self.reason: str | None = None
        self.last = ""
        self._token, self._mark = secrets.token_hex(16), secrets.token_hex(8)
        self._launch(setup, sandbox)
        self.since = time.monotonic()
        self._outgoing = memoryview(json.dumps({**setup, "token": self._token}).encode() + b"\n")
        self._answers, self._reports = bytearray(), bytearray()

    def _launch(self, setup: Mapping[str, Any], sandbox: bool) -> None:
        here = Path(__file__).parent
        control, self._control = os.pipe()
        self._reported, reports = os.pipe()
        command = [sys.executable, "-P", "-u", str(here / "worker.py")]  # -u: what a function prints is shown at once
        # one hash seed for all: some reasoning_gym generators iterate over sets, and a resumed run must make the same
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0", _MARK: self._mark}
        if sandbox:
            command = [*boxes.prefix(setup.get("path")), *command]
            environment = boxes.environment(environment)
        try:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(here / "supervisor.py"), str(control), str(reports), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
                env=environment, start_new_session=True, pass_fds=(control, reports),
            )  # fmt: skip
        finally:
            os.close(control)
            os.close(reports)
        assert self.supervisor.stdin is not None
        assert self.supervisor.stdout is not None
        self.stdin, self.stdout = self.supervisor.stdin, self.supervisor.stdout
        for descriptor in (self.stdin.fileno(), self.stdout.fileno(), self._reported):
            os.set_blocking(descriptor, False)

    def alive(self) -> bool:
        """Whether the child has not ended, as far as is known."""
        return self.ended is None and self.supervisor.poll() is None

    def give(self, task: int, line: bytes) -> None:
        """Hand over a call; `pump` moves it."""
        self.task, self.since, self._outgoing = task, time.monotonic(), memoryview(line)

    def give_up(self, reason: str) -> None:
        """Mark a worker that breaks the protocol; the pool ends it."""
        self.broken, self.reason = True, reason

    def descriptors(self) -> Iterator[tuple[int, int]]:
        """What to wait for: (descriptor, events)."""
        yield self._reported, selectors.EVENT_READ
        if not self.broken:
            yield self.stdout.fileno(), selectors.EVENT_READ
            if self._outgoing:
                yield self.stdin.fileno(), selectors.EVENT_WRITE

    def pump(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Move bytes both ways without waiting: the child's messages and its supervisor's reports that came whole."""
        with contextlib.suppress(BlockingIOError):
            try:
                if self._outgoing:
                    self._outgoing = self._outgoing[os.write(self.stdin.fileno(), self._outgoing) :]
            except BrokenPipeError:
                self._outgoing = memoryview(b"")  # it has ended, and its supervisor says how
        self.broken |= not _read(self.stdout.fileno(), self._answers) or len(self._answers) > _ANSWER_BYTES
        _read(self._reported, self._reports)
        reports = [r for r in map(_object, _lines(self._reports)) if r]
        for report in reports:
            self._note(report)
        start = self._token.encode() + b" "
        mine = [line[len(start) :] for line in _lines(self._answers) if line.startswith(start)]
        return [_object(line) for line in mine], reports

    def _note(self, report: Mapping[str, Any]) -> None:
        if "pid" in report:
            self.pid = report["pid"]
        elif "ended" in report:
            self.ended, self.last = report["ended"], str(report.get("last", ""))
        elif "crowd" in report:
            self.give_up(f"it started more than {MOST_PROCESSES} processes")

    def last_words(self) -> str:
        """How the child ended, and the last line it printed."""
        if self.reason:
            return f"the worker was ended by Kenpo: {self.reason}"
        status = self.supervisor.poll() if self.ended is None else os.waitstatus_to_exitcode(self.ended)
        if status is None:
            return "the worker closed its pipe"
        how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return f"the worker {how}" + (f", its last line was: {self.last}" if self.last else "")

    def release(self) -> None:
        """Ask the supervisor to end everything; it needs a moment."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def kill(self) -> list[dict[str, Any]]:
        """End the child and everything it started, then the supervisor, whatever their state; its last reports."""
        self.release()
        try:
            self.supervisor.wait(timeout=2)
        except subprocess.TimeoutExpired:  # it was stopped
            end_descendants(self.supervisor.pid)
        if self.supervisor.returncode != 0:  # it had no chance to clean up
            with contextlib.suppress(OSError):
                os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.supervisor.wait(timeout=5)
            _end_marked(self._mark)
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        if self._reported < 0:
            return []
        _read(self._reported, self._reports)
        os.close(self._reported)
        self._reported = -1
        return [r for r in map(_object, _lines(self._reports)) if r]


def _read(descriptor: int, into: bytearray) -> bool:
    """Take what is there, a chunk at a time; False at the end of the stream."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    into += chunk
    return bool(chunk)


def _lines(buffer: bytearray) -> list[bytes]:
    """The whole lines of a buffer, which keeps the rest."""
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end]).splitlines()
    del buffer[:end]
    return lines


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _end_marked(mark: str) -> None:
    """Kill what a worker left behind whose supervisor was killed: its environment bears the worker's mark (Linux)."""
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(3):  # one that was forking has a child by now
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
