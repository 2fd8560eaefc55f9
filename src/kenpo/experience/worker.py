"""The child process that runs code which may raise, hang, print or exit: `python worker.py`, JSON lines on pipes.

Standalone on purpose: it imports nothing of Kenpo (and so no torch), only the standard library and what the verifier
needs. The first line it reads is the set-up, `{"kind": …, "memory_bytes": …, …}`; it answers `{"ready": true}` or
`{"failed": "one line"}`. Then each line `{"id": k, "limit": seconds, …}` is answered by one line `{"id": k, …}`.
It ends, with whatever it started, when its standard input closes.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import queue
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def _load_file(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------ the user's function


def _user_function(setup: dict[str, Any]) -> Handler:
    path, name = setup["path"], setup["function"]
    sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbours
    module = _load_file(path, f"kenpo_user_{Path(path).stem}")
    function = getattr(module, name, None)
    if function is None:
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise LookupError(f"no function {name!r}; the functions are {', '.join(known) or 'none'}")
    if not callable(function):
        raise LookupError(f"{name!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise LookupError(f"{name!r} is an async function; make it an ordinary one")
    positional, accepted = _parameters(function, name)

    def handle(sample: dict[str, Any]) -> dict[str, Any]:
        offered = {**sample["extra"], "prompt": sample["prompt"], "truncated": sample["truncated"]}
        named = {key: value for key, value in offered.items() if accepted is None or key in accepted}
        arguments = (sample["completion"], sample["answer"])
        if positional:
            named = {key: value for key, value in named.items() if key not in ("completion", "answer")}
            return _verdict(function(*arguments, **named))
        return _verdict(function(**{**named, "completion": arguments[0], "answer": arguments[1]}))

    return handle


def _parameters(function: Any, name: str) -> tuple[bool, set[str] | None]:
    """Whether completion and answer are handed over by position, and the keywords accepted (None: any)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return True, set()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variable = {p.kind for p in parameters}
    if {"completion", "answer"} <= keywords:  # by name, so that their order can't be mistaken
        positional, taken = False, {"completion", "answer"}
    elif len(by_position) >= 2 or inspect.Parameter.VAR_POSITIONAL in variable:
        positional, taken = True, {p.name for p in by_position[:2]}
    elif inspect.Parameter.VAR_KEYWORD in variable:
        positional, taken = False, {"completion", "answer"}
    else:
        raise LookupError(f"{name!r} must take (completion, answer), by position or by name")
    if inspect.Parameter.VAR_KEYWORD in variable:
        return positional, None
    return positional, keywords - taken


def _verdict(value: Any) -> dict[str, Any]:
    """A function's result as plain data: None and NaN abstain, a dict holds `reward` and named parts."""
    if isinstance(value, dict):
        if "reward" not in value:
            raise TypeError(f"the returned dict has no 'reward' (keys: {', '.join(map(str, value)) or 'none'})")
        parts = {str(key): _number(item, key) for key, item in value.items() if key != "reward"}
        return {**_verdict(_number(value["reward"], "reward")), "parts": parts}
    reward = _number(value, "the returned value")
    if reward is None or math.isnan(reward):
        shown = "None" if reward is None else "NaN"
        return {"status": "abstain", "detail": f"the function returned {shown}"}
    if math.isinf(reward):
        raise ValueError(f"the function returned {reward}")
    return {"status": "ok", "reward": reward}


def _number(value: Any, what: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float, bool) and callable(getattr(value, "item", None)):
        value = value.item()  # a NumPy or torch scalar
    if type(value) not in (int, float, bool):  # the exact type: a class of the user's could claim to equal anything
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    return float(value)


# --------------------------------------------------------------------------------------- mathematics and reasoning_gym


def _mathematics(setup: dict[str, Any]) -> Handler:
    module = _load_file(str(Path(__file__).with_name("mathematics.py")), "kenpo_mathematics")
    module.warm_up()
    return lambda sample: module.compare(gold=sample["gold"], answer=sample["found"])


def _reasoning_gym(setup: dict[str, Any]) -> Handler:
    import functools

    import reasoning_gym

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
        return _verdict(float(dataset.score_answer(sample["found"], row)))

    return handle


KINDS: dict[str, Callable[[dict[str, Any]], Handler]] = {
    "function": _user_function,
    "math": _mathematics,
    "reasoning_gym": _reasoning_gym,
}

# ---------------------------------------------------------------------------------------------------------- the loop


def _one_line(error: BaseException, path: str | None) -> str:
    """`ZeroDivisionError: division by zero (reward.py, line 7)`: the innermost line of the user's own file."""
    text = " ".join(str(error).split())[:300]
    where = ""
    if isinstance(error, SyntaxError) and error.lineno:
        text, where = error.msg, f" ({Path(error.filename or '?').name}, line {error.lineno})"
    elif path:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f" ({Path(path).name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def _limit_memory(size: int | None) -> None:
    if size is None:
        return
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):  # not on this platform
        pass


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


def main() -> None:
    """Serve until standard input closes."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # code under test reads nothing and
    os.dup2(2, 1)  # prints to the log, never into the protocol
    lines: queue.Queue[bytes] = queue.Queue()

    def answer(message: dict[str, Any]) -> None:
        sink.write(json.dumps(message).encode() + b"\n")
        sink.flush()

    setup = json.loads(source.readline())
    threading.Thread(target=_read_forever, args=(source, lines), daemon=True).start()
    path = setup.get("path")
    _limit_memory(setup.get("memory_bytes"))
    try:
        handle = KINDS[setup["kind"]](setup)
    except BaseException as error:  # SystemExit too: whatever stops the loading is reported
        answer({"failed": _one_line(error, path)})
        return
    answer({"ready": True})
    while True:
        sample = json.loads(lines.get())
        _guard(2 * sample["limit"] + 5)
        try:
            result = handle(sample)
        except BaseException as error:
            result = {"status": "error", "detail": _one_line(error, path)}
        _guard(0)
        answer({"id": sample["id"], **result})


if __name__ == "__main__":
    main()
