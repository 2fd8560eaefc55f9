"""Verifiers: from a completion and the known answer to a reward, or to no verdict (NaN), never to a silent 0.

`exact`, `numeric` and `gsm8k` are plain comparisons in this process. `math_verify`, `reasoning_gym` and the user's own
`file.py:fn` run in worker processes with a time limit. A completion that was cut off at the token limit is scored 0
(with the detail "truncated"), not from an intermediate value; `keep_truncated=True` scores it like any other, and a
function of the user's own always decides for itself (it may take `truncated`). A completion in which no answer is found
is also 0, with `answer` None and the detail "no answer found", so that it is counted apart from wrong answers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kenpo.errors import InputError, unknown_name
from kenpo.experience.answers import explicit_answer
from kenpo.experience.exact import Exact, Gsm8k, Numeric
from kenpo.experience.math_verifier import MathVerify
from kenpo.experience.pool import WorkerStartError
from kenpo.experience.remote import Remote
from kenpo.experience.rows import MISSING_PACKAGE
from kenpo.experience.tasks import Task
from kenpo.experience.verdict import NO_ANSWER, InProcess, Sample, Verdict, Verifier

NAMES = ("exact", "numeric", "gsm8k", "math_verify", "reasoning_gym")


class ReasoningGym(Remote):
    """The score that the problem's own reasoning_gym dataset gives, partial credit included.

    The answer is the last explicit form, or the whole completion. The problem must come from a `reasoning_gym:` task:
    its `extra` says which problem it is, and the worker makes the same one again.
    """

    name = "reasoning_gym"

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """Which problem it is, and the answer found."""
        source = sample.extra.get("reasoning_gym")
        if not isinstance(source, Mapping):
            return Verdict(math.nan, "error", None, "the sample's extra does not name a reasoning_gym problem")
        found = explicit_answer(sample.completion) or sample.completion.strip()
        if not found:
            return Verdict(0.0, "ok", None, NO_ANSWER)
        question = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
        return {**source, "question": question, "found": found}


class UserFunction(Remote):
    """`file.py:fn`: called as fn(completion, answer), with `prompt`, `truncated` and other columns if it takes them.

    It returns a number, None or NaN to abstain, or a dict with `reward` and named parts. Whatever it raises is a
    verdict with status "error". Loaded at once in a worker; InputError if that fails.
    """

    keep_truncated = True

    def __init__(self, spec: str, *, workers: int, time_limit: float) -> None:
        file, _, function = spec.rpartition(":")
        self.name = spec
        setup = {"kind": "function", "path": str(Path(file).resolve()), "function": function}
        super().__init__(setup, workers=workers, time_limit=time_limit)
        try:
            self.pool.check()
        except WorkerStartError as error:
            self.close()
            raise InputError(f"verifier {spec}: can't be loaded: {error}") from error

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """The sample as it is."""
        return {
            "completion": sample.completion,
            "answer": sample.answer,
            "prompt": sample.prompt,
            "truncated": sample.truncated,
            "extra": dict(sample.extra),
        }


def load_verifier(
    spec: str,
    *,
    task: Task | None = None,
    time_limit: float = 10.0,
    workers: int = 2,
    keep_truncated: bool = False,
) -> Verifier:
    """The verifier named `spec`: exact, numeric, gsm8k, math_verify, reasoning_gym, or the user's own `file.py:fn`.

    `time_limit` is in seconds for one sample, `workers` counts processes; both speak of verifiers that run out of
    process. Raises UnknownNameError for an unknown name and InputError for a missing package, a task that
    does not go with the verifier, or a function that can't be loaded.
    """
    if not time_limit > 0 or math.isinf(time_limit):
        raise InputError(f"verifier {spec}: the time limit is {time_limit} s; it must be positive and finite")
    if workers < 1:
        raise InputError(f"verifier {spec}: {workers} workers; at least 1 is needed")
    if spec in NAMES:
        verifier = _named(spec, task, workers=workers, time_limit=time_limit)
        verifier.keep_truncated = keep_truncated
        return verifier
    file, colon, function = spec.rpartition(":")
    if spec.endswith(".py"):
        raise InputError(f"verifier {spec}: name the function too, as in {spec}:reward")
    if not colon or not file.endswith(".py") or not function:
        raise unknown_name("verifier", spec, NAMES, "(or your own function as file.py:fn)")
    if not Path(file).is_file():
        raise InputError(f"verifier {spec}: no such file {file}")
    return UserFunction(spec, workers=workers, time_limit=time_limit)


def _named(spec: str, task: Task | None, *, workers: int, time_limit: float) -> Any:
    in_process: dict[str, type[InProcess]] = {"exact": Exact, "numeric": Numeric, "gsm8k": Gsm8k}
    if spec in in_process:
        return in_process[spec]()
    if spec == "reasoning_gym" and getattr(task, "verifier", None) != "reasoning_gym":
        name = getattr(task, "name", "none was given")
        raise InputError(f"verifier reasoning_gym needs a reasoning_gym:NAME task, not {name!r}; name another verifier")
    package = "math_verify" if spec == "math_verify" else "reasoning_gym"
    if importlib.util.find_spec(package) is None:
        raise InputError(f"verifier {spec} needs the package {package}: {MISSING_PACKAGE}")
    setup = {"kind": "math" if spec == "math_verify" else "reasoning_gym"}
    remote = MathVerify if spec == "math_verify" else ReasoningGym
    return remote(setup, workers=workers, time_limit=time_limit)
