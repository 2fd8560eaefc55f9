"""Stands over the process that runs a verifier's code, runs none of that code itself, and ends all that it started.

`python -I supervisor.py CONTROL REPORTS COMMAND…`: runs COMMAND with this process's standard input and output, and
keeps the other two descriptors to itself. When CONTROL closes (Kenpo is done, or gone), every descendant of COMMAND is
ended, also those that left its session or lost their parents: this process adopts them (Linux). What COMMAND prints
comes here through a pipe, so that printing fills no disk. REPORTS gets JSON lines: `{"pid": n}`, `{"printed": line}`
for the first lines, `{"lines": n}`, and at its end `{"ended": wait status, "last": last line}` or `{"crowd": n}`.

Standard library only, as it starts in a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

LINES_SHOWN = 10  # lines that are passed on whole; the others are counted
LINE_LENGTH = 200
MOST_PROCESSES = 512  # of one worker, itself included
_TICK = 0.5  # seconds between two counts of lines and processes
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def control_process(option: int, value: int) -> None:
    """Linux's `prctl`; nothing elsewhere."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux)."""
    control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(root: int) -> list[int]:
    """The processes below `root` that still run; none where there is no /proc."""
    found: list[int] = []
    todo = [root]
    while todo:
        below = _children(todo.pop())
        found += below
        todo += below
    return [pid for pid in found if _runs(pid)]


def end_descendants(root: int, seconds: float = 5.0) -> None:
    """Kill everything below `root` until nothing is left. Complete as long as `root` lives and adopts orphans."""
    end = time.monotonic() + seconds
    while (living := descendants(root)) and time.monotonic() < end:
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


class _Printed:
    """The lines a worker prints: the first ones as they come, then their number."""

    def __init__(self, report: Any) -> None:
        self.report, self.lines, self.told, self.rest, self.last = report, 0, 0, b"", ""

    def feed(self, chunk: bytes) -> None:
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        self.rest = self.rest[: LINE_LENGTH * 4]  # the start of an endless line is enough
        for line in whole:
            self._line(line)

    def _line(self, line: bytes) -> None:
        self.lines += 1
        if line.strip():
            self.last = line.decode("utf-8", "replace").strip()[:LINE_LENGTH]
        if self.lines <= LINES_SHOWN:
            self.report({"printed": line.decode("utf-8", "replace")[:LINE_LENGTH]})

    def count(self) -> None:
        if self.lines > max(self.told, LINES_SHOWN) and self.report({"lines": self.lines}):
            self.told = self.lines

    def finish(self) -> None:
        if self.rest:
            self._line(self.rest)
            self.rest = b""
        self.count()


def _drain(descriptor: int, printed: _Printed) -> None:
    """What is left in the pipe, which holds little; one who goes on printing is not waited for."""
    with contextlib.suppress(OSError):
        for _ in range(64):
            printed.feed(os.read(descriptor, 1 << 16))


def _reap() -> dict[int, int]:
    """Wait statuses of the children, own and adopted, that ended since the last call."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _start(command: list[str], stderr: int) -> int:
    """The command as a child whose descriptors are this process's 0 and 1, and `stderr` as 2; both are then left."""
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, stderr, 2)])
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(stderr)
    return pid


def _bell() -> int:
    """A descriptor that becomes readable when a child ends."""
    ear, mouth = os.pipe()
    os.set_blocking(ear, False)
    os.set_blocking(mouth, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    return ear


def main() -> None:
    """Watch one command until it ends or CONTROL closes."""
    control, reports, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for descriptor in (control, reports):
        os.set_inheritable(descriptor, False)
    fcntl.fcntl(reports, fcntl.F_SETFL, fcntl.fcntl(reports, fcntl.F_GETFL) | os.O_NONBLOCK)

    def report(message: dict[str, Any]) -> bool:
        try:
            return bool(os.write(reports, json.dumps(message).encode() + b"\n"))
        except OSError:  # nobody reads at the moment, or any more
            return False

    control_process(_PR_SET_CHILD_SUBREAPER, 1)
    ear, (out, into) = _bell(), os.pipe()
    os.set_blocking(out, False)
    printed = _Printed(report)
    child = _start(command, into)
    report({"pid": child})
    _watch(child, {"control": control, "out": out, "ear": ear}, printed, report)
    end_descendants(os.getpid())
    _reap()


def _watch(child: int, of: dict[str, int], printed: _Printed, report: Any) -> None:
    poll, counted = select.poll(), time.monotonic()
    for descriptor in of.values():
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(_TICK * 1000)}
        if of["control"] in ready:
            _drain(of["out"], printed)
            printed.finish()
            return
        if of["ear"] in ready:
            with contextlib.suppress(OSError):
                os.read(of["ear"], 1 << 12)
        if of["out"] in ready:
            chunk = os.read(of["out"], 1 << 16)
            printed.feed(chunk)
            if not chunk:  # nobody holds the other end any more
                poll.unregister(of["out"])
        ended = _reap()
        if child in ended:
            _drain(of["out"], printed)
            printed.finish()
            report({"ended": ended[child], "last": printed.last})
            return
        if time.monotonic() - counted >= _TICK:
            counted = time.monotonic()
            printed.count()
            if (crowd := len(descendants(os.getpid()))) > MOST_PROCESSES:
                report({"crowd": crowd})
                return


if __name__ == "__main__":
    main()
