"""A pool of worker processes that can be killed: one sample at a time each, a time limit for each sample.

No signals, pickles or event loops in the parent, so any thread may use it. Worker start-up has a limit of its own and
does not count against a sample.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MEMORY_BYTES = 8 << 30  # address space of one worker
START_LIMIT = 120.0  # seconds until a worker has imported what it needs
_ANSWER_BYTES = 16 << 20  # a longer answer is a broken worker
_LOG_BYTES = 1 << 20  # what a worker has printed is emptied beyond this
_TICK = 0.25  # seconds between looks at the clock and at dead workers


class WorkerStartError(RuntimeError):
    """The worker could not load what it was asked to run; the text is one line."""


class _Worker:
    """One child process with its pipes. `task` is the index of the sample it works on, `since` when it got it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by discard
        descriptor = self.log.fileno()  # appending, so that emptying the log also moves the worker's next write
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        # one hash seed for all: some reasoning_gym generators iterate over sets, and a resumed run must make the same
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            env=environment, start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.ready = False
        self.task: int | None = None
        self.since = time.monotonic()
        self.outgoing = memoryview(json.dumps(dict(setup)).encode() + b"\n")
        self.incoming = bytearray()
        self.broken = False

    def give(self, task: int, line: bytes) -> None:
        self.task, self.since, self.outgoing = task, time.monotonic(), memoryview(line)
        if os.fstat(self.log.fileno()).st_size > _LOG_BYTES:
            os.ftruncate(self.log.fileno(), 0)

    def pump(self, *, readable: bool, writable: bool) -> list[dict[str, Any]]:
        """Move bytes both ways without waiting; the messages that arrived whole."""
        try:
            if writable and self.outgoing:
                self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing) :]
            if readable:
                chunk = os.read(self.stdout.fileno(), 1 << 16)
                self.broken |= not chunk or len(self.incoming) > _ANSWER_BYTES
                self.incoming += chunk
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        messages = []
        while (end := self.incoming.find(b"\n")) >= 0:
            line = bytes(self.incoming[:end])
            del self.incoming[: end + 1]
            try:
                message = json.loads(line)
                messages.append(message if isinstance(message, dict) else {})
            except ValueError:
                self.broken = True
        return messages

    def last_words(self) -> str:
        """The exit status, or signal, and the last line it printed."""
        status = self.process.poll()
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"exited with status {status}"
        size = os.fstat(self.log.fileno()).st_size
        printed = os.pread(self.log.fileno(), 500, max(0, size - 500)).decode("utf-8", "replace").strip().splitlines()
        return f"the worker {how}" + (f", its last line was: {printed[-1][:200]}" if printed else "")

    def kill(self) -> None:
        """End the process and everything in its group. The leader is reaped last, so the group id is still its own."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def discard(self) -> None:
        self.kill()
        self.log.close()


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.discard()
    workers.clear()


class Pool:
    """`workers` processes running the verifier described by `setup`, started when first needed."""

    def __init__(self, setup: Mapping[str, Any], *, workers: int, time_limit: float) -> None:
        self.setup = {"memory_bytes": MEMORY_BYTES, **setup}
        self.size = workers
        self.time_limit = time_limit
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._failure: str | None = None
        self._end = weakref.finalize(self, _end_all, self._workers)

    def processes(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def close(self) -> None:
        """End all workers; the next `run` starts new ones."""
        with self._lock:
            _end_all(self._workers)

    def check(self) -> None:
        """Start one worker and wait until it has loaded; WorkerStartError says why it has not."""
        with self._lock:
            self._fill(1)
            self._loop(deque(), {}, until_ready=True)
            if self._failure:
                raise WorkerStartError(self._failure)

    def run(self, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One answer for each sample, in order; a failure is an answer with status "error" or "timeout"."""
        answers: dict[int, dict[str, Any]] = {}
        waiting: deque[tuple[int, bytes]] = deque()
        for i, sample in enumerate(samples):
            try:
                line = json.dumps({"id": i, "limit": self.time_limit, **sample}).encode() + b"\n"
                waiting.append((i, line))
            except (TypeError, ValueError, RecursionError) as error:
                answers[i] = {"status": "error", "detail": f"the sample can't be written as JSON ({error})"}
        with self._lock:
            self._fill(min(self.size, len(waiting)))
            self._loop(waiting, answers)
            for i, _ in waiting:  # no worker could be started
                answers[i] = {"status": "error", "detail": f"the verifier could not be started: {self._failure}"}
        return [answers[i] for i in range(len(samples))]

    # ------------------------------------------------------------------------------------------------------ inside

    def _fill(self, count: int) -> None:
        self._failure = None
        for worker in [w for w in self._workers if w.broken or w.process.poll() is not None]:
            self._replace(worker, start=False)
        while len(self._workers) < count:
            self._workers.append(_Worker(self.setup))

    def _replace(self, worker: _Worker, *, start: bool) -> None:
        self._workers.remove(worker)
        worker.discard()
        if start:
            self._workers.append(_Worker(self.setup))

    def _loop(
        self, waiting: deque[tuple[int, bytes]], answers: dict[int, dict[str, Any]], *, until_ready: bool = False
    ) -> None:
        """Serve until nothing waits and no worker works (or, with `until_ready`, until one has loaded)."""
        while self._workers and self._failure is None:
            for worker in self._workers:
                if waiting and worker.ready and worker.task is None and not worker.broken:
                    worker.give(*waiting.popleft())
            busy = any(worker.task is not None for worker in self._workers)
            if until_ready and any(worker.ready for worker in self._workers):
                return
            if not until_ready and not waiting and not busy:
                return
            self._exchange(answers)
            self._bury(answers)
        if self._failure is not None:  # those already at work are lost with the pool
            for worker in self._workers:
                if worker.task is not None:
                    answers[worker.task] = {"status": "error", "detail": self._failure}
            _end_all(self._workers)

    def _exchange(self, answers: dict[int, dict[str, Any]]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            wait = min([_TICK, *(max(0.0, self._deadline(w) - time.monotonic()) for w in self._workers)])
            for key, events in selector.select(wait):
                worker = key.data
                messages = worker.pump(
                    readable=bool(events & selectors.EVENT_READ), writable=bool(events & selectors.EVENT_WRITE)
                )
                for message in messages:
                    self._receive(worker, message, answers)

    def _receive(self, worker: _Worker, message: dict[str, Any], answers: dict[int, dict[str, Any]]) -> None:
        if "failed" in message:
            self._failure = str(message["failed"])
        elif message.get("ready") and not worker.ready:
            worker.ready = True
        elif worker.task is not None and message.get("id") == worker.task:
            answers[worker.task] = message
            worker.task = None
        else:
            worker.broken = True

    def _deadline(self, worker: _Worker) -> float:
        if worker.task is not None:
            return worker.since + self.time_limit
        return float("inf") if worker.ready else worker.since + START_LIMIT

    def _drain(self, worker: _Worker, answers: dict[int, dict[str, Any]]) -> None:
        """Read what a dead worker said before it died, and mark it broken."""
        while not worker.broken:
            before = len(worker.incoming)
            messages = worker.pump(readable=True, writable=False)
            for message in messages:
                self._receive(worker, message, answers)
            if not messages and len(worker.incoming) == before:  # a descendant still holds the pipe open
                worker.broken = True

    def _bury(self, answers: dict[int, dict[str, Any]]) -> None:
        """Replace the workers that died or took too long, with a verdict for the sample each had."""
        for worker in list(self._workers):
            if not worker.broken and worker.process.poll() is not None:
                self._drain(worker, answers)
            late = time.monotonic() > self._deadline(worker)
            if not late and not worker.broken:
                continue
            dead = worker.broken
            if dead:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=0.2)  # let a dying process say how it died
                worker.kill()
            started, task = worker.ready, worker.task
            if not started:
                self._failure = self._failure or (f"not ready after {START_LIMIT:g} s" if late else worker.last_words())
                return
            if task is not None and late and not dead:
                answers[task] = {"status": "timeout", "detail": f"no verdict within {self.time_limit:g} s"}
            elif task is not None:
                answers[task] = {"status": "error", "detail": worker.last_words()}
            self._replace(worker, start=True)
