"""Verifiers: from a completion and the known answer to a reward, or to no verdict (NaN), never to a silent 0.

`exact`, `numeric` and `gsm8k` are plain comparisons in this process. `math_verify`, `reasoning_gym` and the user's own
`file.py:fn` run in worker processes with a time limit. A completion that was cut off at the token limit is scored 0
(with the detail "truncated"), not from an intermediate value; `keep_truncated=True` scores it like any other, and a
function of the user's own always decides for itself (it may take `truncated`). A completion in which no answer is found
is also 0, with `answer` None and the detail "no answer found", so that it is counted apart from wrong answers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kenpo.errors import InputError, unknown_name
from kenpo.experience.answers import explicit_answer, gold_after_marker, stated_formula
from kenpo.experience.numerals import close, last_number, parse_number, stated_number
from kenpo.experience.pool import Pool, WorkerStartError
from kenpo.experience.problem import Prompt
from kenpo.experience.rows import MISSING_PACKAGE
from kenpo.experience.tasks import Task

Status = Literal["ok", "error", "timeout", "abstain"]
NAMES = ("exact", "numeric", "gsm8k", "math_verify", "reasoning_gym")
NO_ANSWER, TRUNCATED = "no answer found", "truncated"
_LONGEST_FORMULA = 1_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a verifier is handed; keyword-only, so that completion and answer can't be swapped."""

    completion: str
    answer: Any
    prompt: Prompt = ""
    truncated: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A reward, or NaN for no verdict.

    `status` is "ok" for a number; "error", "timeout" and "abstain" come with NaN. `answer` is the extracted answer
    (None: none found, or the verifier names none), `detail` one line, `parts` named components of the reward.
    """

    reward: float
    status: Status
    answer: str | None = None
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scores samples in order; may be used from any thread and as a context manager."""

    name: str

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given; never raises for what a sample holds."""
        ...

    def close(self) -> None:
        """End worker processes, if any."""
        ...

    def __enter__(self) -> Verifier: ...

    def __exit__(self, *error: object) -> None: ...


def _judged(right: bool, answer: str | None) -> Verdict:
    return Verdict(float(right), "ok", answer)


def _abstain(detail: str, answer: str | None = None) -> Verdict:
    return Verdict(math.nan, "abstain", answer, detail)


class _Base:
    name = ""
    keep_truncated = False

    def close(self) -> None:
        """End worker processes, if any."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _skip(self, sample: Sample) -> Verdict | None:
        """The verdict of a sample that is not looked at: one that was cut off."""
        if sample.truncated and not self.keep_truncated:
            return Verdict(0.0, "ok", None, TRUNCATED)
        return None


class _InProcess(_Base):
    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given."""
        return [self._skip(sample) or self.judge(sample) for sample in samples]

    def judge(self, sample: Sample) -> Verdict:
        """The verdict of one sample that was not cut off."""
        raise NotImplementedError


class Exact(_InProcess):
    """The text must equal the answer: the last explicit form (tag, box, `####`, "answer:") or the whole completion.

    Runs of blanks count as one, Unicode is composed (NFC), case matters. An answer that is not text is compared as a
    JSON value of the same type. An answer without content abstains.
    """

    name = "exact"

    def judge(self, sample: Sample) -> Verdict:
        """1 if the whole text or the explicit answer is the gold, else 0."""
        whole, stated = _squeeze(sample.completion), explicit_answer(sample.completion)
        if isinstance(sample.answer, str):
            gold = _squeeze(sample.answer)
            if not gold:
                return _abstain("the known answer is empty")
            same = [text == gold for text in (whole, _squeeze(stated or ""))]
        elif sample.answer is None:
            return _abstain("the known answer is missing")
        else:
            same = [_same_json(text, sample.answer) for text in (whole, stated or "")]
        found = stated if stated is not None and not same[0] else whole[:200]
        return _judged(any(same), found) if found else Verdict(0.0, "ok", None, NO_ANSWER)


def _squeeze(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _same_json(text: str, gold: Any) -> bool:
    if len(text) > 100_000:
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return type(value) is type(gold) and json.dumps(value, sort_keys=True) == json.dumps(gold, sort_keys=True)


class Numeric(_InProcess):
    """The number stated by the last explicit form, or the last number of the text, must be the gold number.

    Whole numbers must be equal, others within 1e-6 of the gold's size. An explicit form that states a larger expression
    (`3*4`, `3\\pi`) is no answer. A gold that is not one number abstains.
    """

    name = "numeric"

    def judge(self, sample: Sample) -> Verdict:
        """1 if the number is the gold, 0 if it is not or none is found."""
        gold = parse_number(self.gold(sample.answer))
        if gold is None:
            return _abstain(f"the known answer {_shown(sample.answer)} is not a number")
        stated = explicit_answer(sample.completion)
        if stated is not None and any(character.isdigit() for character in stated):
            found = stated_number(stated)
        else:
            found = last_number(sample.completion)
        if found is None:
            return Verdict(0.0, "ok", None, NO_ANSWER)
        return _judged(close(gold=gold, answer=found.value), found.text)

    def gold(self, answer: Any) -> Any:
        """The part of the known answer that holds the number."""
        return answer


class Gsm8k(Numeric):
    """`numeric`, with the gold taken from after the last `####` of the known solution (or all of it without one)."""

    name = "gsm8k"

    def gold(self, answer: Any) -> Any:
        """What follows `####`."""
        return (gold_after_marker(answer) or answer) if isinstance(answer, str) else answer


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"


class _Remote(_Base):
    """Samples are prepared here, scored in worker processes, and the plain data that comes back is read here."""

    def __init__(self, setup: Mapping[str, Any], *, workers: int, time_limit: float) -> None:
        self.pool = Pool(setup, workers=workers, time_limit=time_limit)

    def close(self) -> None:
        """End the worker processes; scoring again starts new ones."""
        self.pool.close()

    def processes(self) -> list[int]:
        """Process ids of the live workers."""
        return self.pool.processes()

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """What the worker is sent, or a verdict that needs no worker."""
        raise NotImplementedError

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given; a failure of one leaves the others' verdicts alone."""
        prepared = [self._skip(sample) or self.prepare(sample) for sample in samples]
        sent = [(i, item) for i, item in enumerate(prepared) if not isinstance(item, Verdict)]
        answers = self.pool.run([item for _, item in sent])
        verdicts = {i: _read(answer, f"sample {i}", item) for (i, item), answer in zip(sent, answers, strict=True)}
        return [item if isinstance(item, Verdict) else verdicts[i] for i, item in enumerate(prepared)]


def _read(answer: Mapping[str, Any], where: str, sent: Mapping[str, Any]) -> Verdict:
    """A worker's answer as a verdict: types and ranges are checked here, whatever the worker claims."""
    status: Any = answer.get("status")
    reward, found = answer.get("reward"), sent.get("found")
    detail = str(answer.get("detail", ""))
    detail = f"{where}: {detail}" if detail and status in ("error", "timeout") else detail
    parts = answer.get("parts") or {}
    parts = {str(k): float(v) if isinstance(v, int | float) else math.nan for k, v in parts.items()}
    if status == "ok" and isinstance(reward, int | float) and math.isfinite(reward):
        return Verdict(float(reward), "ok", found, detail, parts)
    if status not in ("error", "timeout", "abstain"):
        status, detail = "error", f"{where}: the worker sent no usable verdict"
    return Verdict(math.nan, status, found, detail, parts)


class MathVerify(_Remote):
    """Mathematical equality by math_verify: LaTeX, sets, intervals, units; see `mathematics.py` for what is mended.

    The answer is the last explicit form, else the last formula in math delimiters, else a text of one short line that
    is no prose, else (where the gold is a number) the last number. A gold that can't be read abstains for all.
    """

    name = "math_verify"

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """Gold and answer as strings of one formula each."""
        gold = sample.answer if isinstance(sample.answer, str) else json.dumps(sample.answer)
        gold = gold_after_marker(gold) or gold
        gold = explicit_answer(gold) or gold
        if sample.answer is None or not gold.strip():
            return _abstain("the known answer is empty")
        found = stated_formula(sample.completion)
        if found is None and parse_number(gold) is not None:  # a formula is not compared with a stray number
            number = last_number(sample.completion)
            found = number.text if number else None
        if found is None or len(found) > _LONGEST_FORMULA:
            # an unreadable gold must abstain for all, so the worker looks at it before this counts as wrong
            return {"gold": gold, "found": None}
        return {"gold": gold, "found": found}


class ReasoningGym(_Remote):
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


class UserFunction(_Remote):
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
    in_process: dict[str, type[_InProcess]] = {"exact": Exact, "numeric": Numeric, "gsm8k": Gsm8k}
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
