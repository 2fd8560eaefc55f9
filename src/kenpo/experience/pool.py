"""A pool of worker processes that can be killed: one call at a time each, a time limit for each call.

No signals, pickles or event loops in the parent, so any thread may use it. Worker start-up has a limit of its own and
does not count against a call. A pool whose first calls all fail in one way gives up within seconds.
"""

from __future__ import annotations

import json
import selectors
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kenpo.experience.process import Process

MEMORY_BYTES = 8 << 30  # address space of one worker
START_LIMIT = 120.0  # seconds until a worker has imported what it needs
SLOW_FAILURES, QUICK_FAILURES, QUICK = 4, 8, 5.0  # give up after so many of one kind: the first number beyond QUICK s
_BARREN = 5  # workers in a row that end before they were asked anything
_TICK = 0.25  # seconds between looks at the clock and at dead workers


class WorkerStartError(RuntimeError):
    """The worker could not load what it was asked to run; the text is one line."""


@dataclass(frozen=True)
class Workers:
    """How many processes judge, and what each may take.

    `time_limit`: seconds for one call. `memory`: bytes of address space of a process; 0: no limit. `sandbox`: under
    bubblewrap. `show` is handed the first lines that a function prints; None: they are only counted.
    """

    count: int = 2
    time_limit: float = 10.0
    memory: int = MEMORY_BYTES
    sandbox: bool = False
    show: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Hopeless:
    """Why a pool gave up: how often the first calls failed, and how the first of them did."""

    calls: int
    status: str
    detail: str


def _end_all(workers: list[Process]) -> None:
    for worker in workers:
        worker.release()
    for worker in workers:
        worker.kill()
    workers.clear()


def failed_in(answer: Mapping[str, Any]) -> str | None:
    """The kind of failure of an answer all of whose verdicts are failures of one kind, else None."""
    results = answer.get("results") or [answer]
    kinds = {str(r.get("kind") or r.get("status")) for r in results if isinstance(r, Mapping)}
    failures = all(isinstance(r, Mapping) and r.get("status") in ("error", "timeout") for r in results)
    return kinds.pop() if failures and len(kinds) == 1 else None


class Pool:
    """Processes running the verifier described by `setup`, started when first needed."""

    def __init__(self, setup: Mapping[str, Any], how: Workers, *, grace: float = 0.0) -> None:
        self.setup = {"memory_bytes": how.memory or None, **setup}
        self.how, self.grace = how, grace
        self.hopeless: Hopeless | None = None
        self.proven = False  # some call did not fail
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._workers: list[Process] = []
        self._failure: str | None = None
        self._barren = 0
        self._printed = Printed(how.show)
        self._end = weakref.finalize(self, _end_all, self._workers)

    @property
    def printed(self) -> int:
        """Lines that the workers have printed so far."""
        return self._printed.lines

    def processes(self) -> list[int]:
        """Ids of the live processes that run the verifier's code."""
        return [worker.pid or worker.supervisor.pid for worker in self._workers if worker.alive()]

    def close(self) -> None:
        """End all workers, also under a `run` of another thread; the next `run` starts new ones."""
        self._stop.set()
        with self._lock:
            self._stop.clear()
            for worker in self._workers:
                worker.release()
            for worker in list(self._workers):
                self._replace(worker, start=False)
            self._printed.finish()

    def check(self) -> dict[str, Any]:
        """Start one worker and wait until it has loaded: what it says of itself. WorkerStartError if it can't."""
        with self._lock:
            self._fill(1)
            self._loop(deque(), {}, until_ready=True)
            if self._failure:
                raise WorkerStartError(self._failure)
            return dict(self._workers[0].facts)

    def run(self, calls: Sequence[Mapping[str, Any]], *, patient: bool = True) -> list[dict[str, Any]]:
        """One answer for each call, in order; a failure is an answer with status "error" or "timeout".

        Unless `patient`, a pool none of whose calls ever succeeded stops at the first few that fail in the same way:
        `hopeless` says how, and the calls that are left get an error.
        """
        answers: dict[int, dict[str, Any]] = {}
        waiting: deque[tuple[int, bytes]] = deque()
        for i, call in enumerate(calls):
            try:
                line = json.dumps({"id": i, "limit": self.how.time_limit, **call}).encode() + b"\n"
                waiting.append((i, line))
            except (TypeError, ValueError, RecursionError) as error:
                answers[i] = {"status": "error", "detail": f"the sample can't be written as JSON ({error})"}
        with self._lock:
            self.hopeless = None
            self._fill(min(self.how.count, len(waiting)))
            self._loop(waiting, answers, watch=not patient)
            why = f"the verifier could not be started: {self._failure}" if self._failure else "not tried"
            for i in range(len(calls)):
                answers.setdefault(i, {"status": "error", "detail": why})
        return [answers[i] for i in range(len(calls))]

    # ------------------------------------------------------------------------------------------------------ inside

    def _fill(self, count: int) -> None:
        self._failure, self._barren = None, 0
        for worker in [w for w in self._workers if w.broken or not w.alive()]:
            self._replace(worker, start=False)
        while len(self._workers) < count:
            self._workers.append(self._start())

    def _start(self) -> Process:
        return Process(self.setup, sandbox=self.how.sandbox)

    def _replace(self, worker: Process, *, start: bool) -> None:
        self._workers.remove(worker)
        for report in worker.kill():
            self._printed.take(worker, report)
        if start:
            self._workers.append(self._start())

    def _loop(
        self,
        waiting: deque[tuple[int, bytes]],
        answers: dict[int, dict[str, Any]],
        *,
        until_ready: bool = False,
        watch: bool = False,
    ) -> None:
        """Serve until nothing waits and no worker works (or, with `until_ready`, until one has loaded)."""
        began = time.monotonic()
        while self._workers and self._failure is None and not self._stop.is_set():
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
            if watch and self._give_up(answers, time.monotonic() - began):
                _end_all(self._workers)
        if self._failure is not None:  # those already at work are lost with the pool
            for worker in self._workers:
                if worker.task is not None:
                    answers[worker.task] = {"status": "error", "detail": self._failure}
            _end_all(self._workers)

    def _give_up(self, answers: Mapping[int, Mapping[str, Any]], seconds: float) -> bool:
        if self.proven or not answers:
            return False
        kinds = Counter(failed_in(answer) for answer in answers.values())
        if None in kinds:
            self.proven = True
            return False
        kind, count = kinds.most_common(1)[0]
        if count < (SLOW_FAILURES if seconds > QUICK else QUICK_FAILURES):
            return False
        first = next(answers[i] for i in sorted(answers) if failed_in(answers[i]) == kind)
        first = (first.get("results") or [first])[0]
        self.hopeless = Hopeless(count, str(first.get("status")), str(first.get("detail", "")))
        return True

    def _exchange(self, answers: dict[int, dict[str, Any]]) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                for descriptor, events in worker.descriptors():
                    selector.register(descriptor, events, worker)
            wait = min([_TICK, *(max(0.0, self._deadline(w) - time.monotonic()) for w in self._workers)])
            for worker in {key.data for key, _ in selector.select(wait)}:
                self._hear(worker, answers)

    def _hear(self, worker: Process, answers: dict[int, dict[str, Any]] | None = None) -> bool:
        """Move bytes both ways and take in what came; whether anything did."""
        messages, reports = worker.pump()
        for report in reports:
            self._printed.take(worker, report)
        for message in messages:
            self._receive(worker, message, {} if answers is None else answers)
        return bool(messages or reports)

    def _receive(self, worker: Process, message: dict[str, Any], answers: dict[int, dict[str, Any]]) -> None:
        if "failed" in message:
            self._failure = str(message["failed"])
        elif message.get("ready") and not worker.ready:
            worker.ready, worker.facts = True, message
        elif worker.task is not None and message.get("id") == worker.task:
            answers[worker.task] = message
            worker.task = None
        else:
            worker.give_up("it sent an answer that nobody asked for")

    def _deadline(self, worker: Process) -> float:
        if worker.task is not None:
            return worker.since + self.how.time_limit + self.grace
        return float("inf") if worker.ready else worker.since + START_LIMIT

    def _bury(self, answers: dict[int, dict[str, Any]]) -> None:
        """Replace the workers that died or took too long, with a verdict for the call each had."""
        for worker in list(self._workers):
            if not worker.broken and not worker.alive():
                while self._hear(worker, answers):  # what it said before it died
                    pass
                worker.broken = True
            late = time.monotonic() > self._deadline(worker)
            if not late and not worker.broken:
                continue
            if worker.broken:
                self._await_end(worker)
            task, limit = worker.task, self.how.time_limit
            if not worker.ready:
                self._failure = self._failure or (worker.last_words() if worker.broken else _not_ready())
                return
            if task is not None and late and not worker.broken:
                answers[task] = {"status": "timeout", "detail": f"no verdict within {limit:g} s", "kind": "timeout"}
            elif task is not None:
                how = worker.last_words()
                answers[task] = {"status": "error", "detail": how, "kind": how.partition(", its last line")[0]}
            self._barren = 0 if task is not None else self._barren + 1
            if self._barren >= _BARREN:
                self._failure = worker.last_words()
                return
            self._replace(worker, start=True)

    def _await_end(self, worker: Process) -> None:
        """Let a dying worker's supervisor say how it died."""
        end = time.monotonic() + 0.3
        while worker.ended is None and worker.reason is None and time.monotonic() < end:
            if not self._hear(worker):
                time.sleep(0.005)


def _not_ready() -> str:
    return f"not ready after {START_LIMIT:g} s"


class Printed:
    """What the workers printed: the first lines are shown, all are counted."""

    def __init__(self, show: Callable[[str], None] | None, lines: int = 10) -> None:
        self.show, self.left, self.told = show, lines, 0
        self._passed: Counter[int] = Counter()  # lines by worker, as they came
        self._counted: dict[int, int] = {}  # lines by worker, as its supervisor counted them

    @property
    def lines(self) -> int:
        """All lines of all workers."""
        return sum(max(n, self._counted.get(w, 0)) for w, n in self._passed.items())

    def take(self, worker: Process, report: Mapping[str, Any]) -> None:
        """One report of a worker's supervisor."""
        if isinstance(report.get("printed"), str):
            self._passed[worker.number] += 1
            if self.show and self.left > 0:
                self.left -= 1
                self.show(visible(report["printed"]))
                self.told += 1
        elif isinstance(report.get("lines"), int):
            self._counted[worker.number] = report["lines"]

    def finish(self) -> None:
        """Say how many lines there were, where not all were shown."""
        if self.show and self.lines > self.told:
            self.show(f"({self.lines:,} lines in all; the first {self.told} are shown)")
            self.told = self.lines


def visible(text: str) -> str:
    r"""Text of unknown origin made fit for a terminal: control characters become escapes.

    >>> visible("a\x1b[2J\tb")
    'a\\x1b[2J\tb'
    """
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)
