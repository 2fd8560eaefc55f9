"""Verifiers: from a completion and the known answer to a reward, or to no verdict (NaN), never to a silent 0.

`exact`, `numeric` and `gsm8k` are plain comparisons in this process. `math_verify`, `reasoning_gym` and the user's own
`file.py:fn` run in worker processes with a time limit. A completion that was cut off at the token limit is scored 0
(with the detail "truncated"), not from an intermediate value; `keep_truncated=True` scores it like any other, and a
function of the user's own always decides for itself (it may take `truncated`). A completion in which no answer is found
is also 0, with `answer` None and the detail "no answer found", so that it is counted apart from wrong answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kenpo.errors import InputError, unknown_name
from kenpo.experience.answers import spoken, statements
from kenpo.experience.exact import Exact, Gsm8k, Numeric
from kenpo.experience.files import FileTask
from kenpo.experience.functions import UserFunction
from kenpo.experience.golds import check_golds
from kenpo.experience.math_verifier import MathVerify
from kenpo.experience.options import JudgeOptions
from kenpo.experience.pool import MEMORY_BYTES, Workers
from kenpo.experience.remote import Remote
from kenpo.experience.reward_model import PREFIX, RewardModel
from kenpo.experience.rows import MISSING_PACKAGE
from kenpo.experience.sandbox import check as check_sandbox
from kenpo.experience.tasks import Task
from kenpo.experience.verdict import NO_ANSWER, InProcess, Sample, Verdict, Verifier
from kenpo.experience.weighted import Weighted, part_names, read_weight
from kenpo.terminal import bytes_of

NAMES = ("exact", "numeric", "gsm8k", "math_verify", "reasoning_gym")
_ROWS_LOOKED_AT = 1000


class ReasoningGym(Remote):
    """The score that the problem's own reasoning_gym dataset gives, partial credit included.

    The answer is what the completion states, or the whole of it. The problem must come from a `reasoning_gym:` task:
    its `extra` says which problem it is, and the worker makes the same one again.
    """

    name = "reasoning_gym"

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """Which problem it is, and the answer found."""
        source = sample.extra.get("reasoning_gym")
        if not isinstance(source, Mapping):
            return Verdict(math.nan, "error", None, "the sample's extra does not name a reasoning_gym problem")
        text = spoken(sample.completion)
        found = next((stated.content for stated in statements(text)), text.strip())
        if not found:
            return Verdict(0.0, "ok", None, NO_ANSWER)
        question = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
        return {**source, "question": question, "found": found}


def load_verifier(
    spec: str | Sequence[str],
    *,
    task: Task | None = None,
    time_limit: float = 10.0,
    workers: int = 2,
    memory: int = MEMORY_BYTES,
    sandbox: bool = False,
    show: Callable[[str], None] | None = None,
    answer_column: str | None = None,
    keep_truncated: bool = False,
) -> Verifier:
    """The verifier named `spec`: exact, numeric, gsm8k, math_verify, reasoning_gym, or the user's own `file.py:fn`.

    Several, each perhaps as `SPEC=WEIGHT` (1 without it), are named parts of one reward, their weighted sum: `Weighted`
    has the rule for a part without verdict. `time_limit` is in seconds for one call, `workers` counts processes of each
    verifier, `memory` bounds the address space of one in bytes (0: no bound), `sandbox` puts them under bubblewrap; all
    speak of verifiers that run out of process. `show` is handed the first lines that a function prints. Raises
    UnknownNameError for an unknown name and InputError for a missing package, a task that does not go with the
    verifier, or a function that can't be loaded.
    """
    items = [spec] if isinstance(spec, str) else list(spec)
    listed = " ".join(items)
    if not time_limit > 0 or math.isinf(time_limit):
        raise InputError(f"verifier {listed}: the time limit is {time_limit} s; it must be positive and finite")
    if workers < 1:
        raise InputError(f"verifier {listed}: {workers} workers; at least 1 is needed")
    if memory < 0:
        raise InputError(f"verifier {listed}: a memory limit of {memory} bytes; give 0 for none")
    if not items:
        raise InputError("verifier: none is named")
    if sandbox:
        check_sandbox()
    pairs = [read_weight(item) for item in items]
    names = part_names([name for name, _ in pairs])
    with contextlib.ExitStack() as loaded:
        parts = []
        for name, _ in pairs:
            how = Workers(workers, time_limit, memory, sandbox, _labelled(show, name))
            parts.append(loaded.enter_context(_load(name, task, how, answer_column, keep_truncated)))
        loaded.pop_all()
    if len(pairs) == 1 and pairs[0][1] is None:
        return parts[0]
    return Weighted(parts, names, [1.0 if w is None else w for _, w in pairs], listed)


def _labelled(show: Callable[[str], None] | None, name: str) -> Callable[[str], None] | None:
    return None if show is None else lambda line: show(f"[{name}] {line}")


def _load(spec: str, task: Task | None, how: Workers, answer_column: str | None, keep_truncated: bool) -> Any:
    if spec in NAMES:
        verifier = _named(spec, task, how)
        verifier.keep_truncated = keep_truncated
        if isinstance(task, FileTask):
            with contextlib.ExitStack() as refused:
                refused.callback(verifier.close)
                check_golds(verifier, task.problems)
                refused.pop_all()
        return verifier
    if spec.startswith(PREFIX):
        return RewardModel(spec)
    file, colon, function = spec.rpartition(":")
    if spec.endswith(".py"):
        raise InputError(f"verifier {spec}: name the function too, as in {spec}:reward")
    if not colon or not file.endswith(".py") or not function:
        raise unknown_name("verifier", spec, NAMES, "(or your own function as file.py:fn, or model:FOLDER)")
    if not Path(file).is_file():
        raise InputError(f"verifier {spec}: no such file {file}")
    return UserFunction(
        spec, how, columns=_columns(task), answer_column=answer_column, task=getattr(task, "name", "")
    )  # fmt: skip


def _columns(task: Task | None) -> list[str] | None:
    """The columns that rows of the data have, as far as the first rows tell; None without data."""
    if task is None:
        return None
    first = [task.train(0)] if task.ids is None else [task.problem(i) for i in task.ids[:_ROWS_LOOKED_AT]]
    return sorted({name for problem in first for name in problem.extra})


def _named(spec: str, task: Task | None, how: Workers) -> Any:
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
    return remote(setup, how)


def told_of(config: JudgeOptions) -> str:
    """The verifiers, and what those that run in processes of their own may take."""
    given = config.verifier
    items = [given] if isinstance(given, str) else given or ()
    if all(name.partition("=")[0] in ("exact", "numeric", "gsm8k") for name in items):
        return " + ".join(items)
    memory = f"{bytes_of(config.verifier_memory)} of address space" if config.verifier_memory else "no limit on memory"
    box = "under bubblewrap" if config.sandbox else "no sandbox"
    return (
        f"{' + '.join(items)}: {config.verifier_workers} process(es), {config.time_limit:g} s a call, {memory}, {box}"
    )
