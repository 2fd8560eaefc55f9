"""The child process that runs code which may raise, hang, print or exit: `python worker.py`, JSON lines on pipes.

Standalone on purpose: it imports nothing of Kenpo (and so no torch), only the standard library, its neighbours by path
and what the verifier needs. The first line it reads is the set-up, `{"kind": …, "token": …, "memory_bytes": …, …}`; it
answers `{"ready": true}` or `{"failed": "one line"}`. Then each line `{"id": k, "limit": seconds, …}` is answered by
one line `{"id": k, …}`. An answer begins with the token, so that nothing else that is written into the pipe is taken
for one: other lines are passed over. It ends when its standard input closes, or with the process that started it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import queue
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE_BYTES = 4 << 30  # the longest file that a worker may write
OPEN_FILES = 1024
FURTHER_PROCESSES = 512  # of this user, beyond those that run when the worker starts
_CANNOT_ALLOCATE = 12  # errno ENOMEM

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def _load_file(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _neighbour(name: str) -> Any:
    return _load_file(str(Path(__file__).with_name(f"{name}.py")), f"kenpo_{name}")


# ------------------------------------------------------------------------------------------------ the user's function


def _user_function(setup: dict[str, Any], failure: Failure) -> tuple[Handler, dict[str, Any]]:
    signatures = _neighbour("signatures")
    path, name = setup["path"], setup["function"]
    sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbours
    module = _load_file(path, f"kenpo_user_{Path(path).stem}")
    function = getattr(module, name, None)
    if function is None:
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise LookupError(f"no function {name!r}; the functions are {', '.join(known) or 'none'}")
    if not callable(function):
        raise LookupError(f"{name!r} is a {type(function).__name__}, not a function")
    columns = setup.get("columns")
    data = signatures.Data(None if columns is None else frozenset(columns), setup.get("answer_column"), setup["task"])
    call = signatures.Call(function, name, data)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        return {"results": call.results(message["samples"], message["limit"], failure)}

    return handle, {"whole": call.whole, "asynchronous": call.asynchronous, "form": call.form.name}


# --------------------------------------------------------------------------------------- mathematics and reasoning_gym


def _mathematics(setup: dict[str, Any], failure: Failure) -> tuple[Handler, dict[str, Any]]:
    here = Path(__file__).parent
    for name, folder in (("kenpo", here.parent), ("kenpo.experience", here)):
        sys.modules[name] = package = types.ModuleType(name)  # not kenpo/__init__.py, which would load torch
        package.__path__ = [str(folder)]
    module = importlib.import_module("kenpo.experience.mathematics")
    module.warm_up()
    return lambda sample: module.compare(gold=sample["gold"], answer=sample["found"]), {}


def _reasoning_gym(setup: dict[str, Any], failure: Failure) -> tuple[Handler, dict[str, Any]]:
    import functools

    import reasoning_gym

    signatures = _neighbour("signatures")

    @functools.lru_cache(maxsize=64)
    def entry(name: str, seed: int) -> tuple[Any, Any]:
        random.seed(seed)  # some generators (codeio) also draw from the global ones
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % (1 << 32))
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=1)
        return dataset, dataset[0]

    def handle(sample: dict[str, Any]) -> dict[str, Any]:
        if sample.get("catalogue"):
            from reasoning_gym.factory import DATASETS
            from reasoning_gym.utils import SYSTEM_PROMPTS

            return {"datasets": sorted(DATASETS), "system": SYSTEM_PROMPTS["default"]}
        if sample.get("make"):
            made = entry(sample["dataset"], sample["seed"])[1]
            return {"question": made["question"], "answer": made["answer"]}
        dataset, row = entry(sample["dataset"], sample["seed"])
        if row["question"] != sample["question"]:
            raise LookupError(f"reasoning_gym made another problem of {sample['dataset']} seed {sample['seed']}")
        return signatures.verdict(float(dataset.score_answer(sample["found"], row)))

    return handle, {}


# ------------------------------------------------------------------------------------------------------------- errors


class Failure:
    """An exception as plain data. `kind` is the same for faults of one kind: the exception's type and its line."""

    def __init__(self, path: str | None, memory: int | None) -> None:
        self.path, self.memory = path, memory

    def __call__(self, error: BaseException) -> dict[str, Any]:
        kind = f"{type(error).__name__}{self._where(error)}"
        if type(error).__name__ == "OutOfTimeError":
            return {"status": "timeout", "detail": "no verdict within the time limit", "kind": "timeout"}
        return {"status": "error", "detail": self.one_line(error), "kind": kind}

    def _where(self, error: BaseException) -> str:
        """The innermost line of the user's own file."""
        if isinstance(error, SyntaxError) and error.lineno:
            return f" ({Path(error.filename or '?').name}, line {error.lineno})"
        frames = traceback.extract_tb(error.__traceback__) if self.path else []
        lines = [frame.lineno for frame in frames if frame.filename == self.path]
        return f" ({Path(self.path or '').name}, line {lines[-1]})" if lines else ""

    def one_line(self, error: BaseException) -> str:
        """`ZeroDivisionError: division by zero (reward.py, line 7)`."""
        text = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())[:1000]
        name = "" if type(error) is LookupError and text else type(error).__name__  # LookupError: a refusal of ours
        line = f"{name}{': ' if name and text else ''}{text}{self._where(error)}"
        short = isinstance(error, MemoryError) or getattr(error, "errno", None) == _CANNOT_ALLOCATE
        if short and self.memory:
            line += f"; a worker may map {self.memory / (1 << 30):g} GiB: --verifier-memory raises that, 0 lifts it"
        return line


KINDS: dict[str, Callable[[dict[str, Any], Failure], tuple[Handler, dict[str, Any]]]] = {
    "function": _user_function,
    "math": _mathematics,
    "reasoning_gym": _reasoning_gym,
}

# ------------------------------------------------------------------------------------------------------------- limits


def _tasks_of_user() -> int:
    """How many processes and threads of this user run now: what the kernel counts against RLIMIT_NPROC."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:  # it ended meanwhile
            continue
    return count


def _limit(memory: int | None) -> None:
    """Bound what this process and its children may take; a bound that the system does not know, or refuses, is left."""
    try:
        import resource
    except ImportError:  # not on this platform
        return
    wanted = {"RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": OPEN_FILES, "RLIMIT_CORE": 0}
    if memory:
        wanted["RLIMIT_AS"] = memory
    if os.path.isdir("/proc"):
        wanted["RLIMIT_NPROC"] = _tasks_of_user() + FURTHER_PROCESSES
    for name, size in wanted.items():
        try:
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            size = size if hard == resource.RLIM_INFINITY else min(size, hard)
            resource.setrlimit(number, (size, size))
        except (AttributeError, ValueError, OSError):
            continue


# ----------------------------------------------------------------------------------------------------------- the loop


def _read_forever(source: Any, lines: queue.Queue[bytes]) -> None:
    for line in source:
        lines.put(line)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the parent is gone: end, and take along what was started here
    os._exit(0)


def _guard(seconds: float) -> None:
    """Have the kernel end this process should it hang where not even a Python thread runs and the parent is gone."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _private_pipes() -> tuple[Any, Callable[[str, Mapping[str, Any]], None]]:
    """The protocol's two ends, moved away from where code under test reads and prints; a forked child gets neither."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # code under test reads nothing and
    os.dup2(2, 1)  # prints to the log, never into the protocol
    os.register_at_fork(after_in_child=lambda: os.close(sink))

    def answer(token: str, message: Mapping[str, Any]) -> None:
        # a line break in front ends whatever else was written into the pipe
        rest = f"\n{token} {json.dumps(message)}\n".encode()
        while rest:
            rest = rest[os.write(sink, rest) :]

    return source, answer


def main() -> None:
    """Serve until standard input closes."""
    if sys.platform == "linux":
        _neighbour("supervisor").die_with_parent()
    source, answer = _private_pipes()
    lines: queue.Queue[bytes] = queue.Queue()
    setup = json.loads(source.readline())
    token, memory = setup.pop("token"), setup.get("memory_bytes")
    threading.Thread(target=_read_forever, args=(source, lines), daemon=True).start()
    failure = Failure(setup.get("path"), memory)
    _limit(memory)
    try:
        handle, facts = KINDS[setup["kind"]](setup, failure)
    except BaseException as error:  # SystemExit too: whatever stops the loading is reported
        answer(token, {"failed": failure.one_line(error)})
        return
    me = os.getpid()
    answer(token, {"ready": True, **facts})
    while True:
        sample = json.loads(lines.get())
        _guard(2 * sample["limit"] + 5)
        try:
            result = handle(sample)
        except BaseException as error:
            result = failure(error)
        if os.getpid() != me:  # the function forked, and this is the child: its answer was asked of the parent
            os._exit(0)
        _guard(0)
        answer(token, {"id": sample["id"], **result})


if __name__ == "__main__":
    main()
