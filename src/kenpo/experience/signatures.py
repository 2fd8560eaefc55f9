"""How a reward function is called and what its result means: one table of signatures, read from parameter names.

Runs inside a worker process, where nothing of Kenpo is imported: standard library only. Never by position, so that two
arguments can't change places without a word. `bind` refuses a function that fits no row of the table:

| form | known by | called with |
|---|---|---|
| one completion | `completion` | `completion`, `answer`, `prompt`, `truncated`, any column |
| a group | `completions` and `answers` | lists: `completions`, `answers`, `prompts`, `truncated`, any column |
| TRL | `completions` without `answers` | the same; completions are messages where the prompt is |
| verl | `solution_str` | `solution_str`, `ground_truth`, `data_source`, `extra_info` |
| verl, a batch | `solution_strs` | `solution_strs`, `ground_truths`, `data_sources`, `extra_infos` |
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMS = "f(completion, answer, prompt, truncated, COLUMN…), f(completions, answers, …) for whole groups, TRL's f(prompts, completions, **kwargs) or verl's f(data_source, solution_str, ground_truth, extra_info), each with as many of these names as it needs"  # fmt: skip  # noqa: E501
_MEANT = {
    **dict.fromkeys(("response", "output", "text", "prediction", "generation"), "completion"),
    **dict.fromkeys(("gold", "target", "label", "truth", "expected", "reference"), "answer"),
    **dict.fromkeys(("question", "query", "problem"), "prompt"),
}
_PART = re.compile(r"\w[\w.\-]{0,63}")
_P = inspect.Parameter

Sample = Mapping[str, Any]
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Data:
    """What is known of the data when a function is loaded. `columns` None: nothing."""

    columns: frozenset[str] | None = None
    answer_column: str | None = None
    task: str = ""


@dataclass(frozen=True)
class Parameters:
    """A function's parameters: all names, those without a default, and what it takes besides."""

    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    by_position: tuple[str, ...] = ()  # positional-only
    rest: bool = False  # **kwargs
    any_number: bool = False  # *args
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Any) -> Parameters:
        """Read by `inspect`; a builtin that has no signature takes any arguments by position."""
        try:
            found = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return cls(any_number=True)
        named = [p for p in found if p.kind not in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)]
        return cls(
            tuple(p.name for p in named),
            tuple(p.name for p in named if p.default is _P.empty),
            tuple(p.name for p in named if p.kind is _P.POSITIONAL_ONLY),
            any(p.kind is _P.VAR_KEYWORD for p in found),
            any(p.kind is _P.VAR_POSITIONAL for p in found),
            {p.name: inspect.formatannotation(p.annotation) for p in named if p.annotation is not _P.empty},
        )


# -------------------------------------------------------------------------------------------------- what is offered


def _single(samples: Sequence[Sample], data: Data, parameters: Parameters) -> dict[str, Any]:
    (sample,) = samples
    own = {data.answer_column: sample["answer"]} if data.answer_column else {}
    return {**sample["extra"], **own, **{n: sample[n] for n in ("completion", "answer", "prompt", "truncated")}}


def _columns(samples: Sequence[Sample], data: Data) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in samples for name in sample["extra"])
    lists = {name: [sample["extra"].get(name) for sample in samples] for name in names}
    own = {data.answer_column: [s["answer"] for s in samples]} if data.answer_column else {}
    return {**lists, **own}


def _group(samples: Sequence[Sample], data: Data, parameters: Parameters) -> dict[str, Any]:
    answers = [s["answer"] for s in samples]
    return {
        **_columns(samples, data),
        "completions": [s["completion"] for s in samples],
        "answers": answers,
        "answer": answers,
        "prompts": [s["prompt"] for s in samples],
        "truncated": [s["truncated"] for s in samples],
    }


def _trl(samples: Sequence[Sample], data: Data, parameters: Parameters) -> dict[str, Any]:
    """An annotation says whether completions are texts or messages; without one they are what the prompt is."""
    note = parameters.notes.get("completions", "").lower()

    def shaped(sample: Sample) -> Any:
        messages = "dict" in note or ("str" not in note and not isinstance(sample["prompt"], str))
        text = sample["completion"]
        return [{"role": "assistant", "content": text}] if messages else text

    return {**_group(samples, data, parameters), "completions": [shaped(s) for s in samples]}


def _verl(samples: Sequence[Sample], data: Data, parameters: Parameters) -> dict[str, Any]:
    batch = _verl_batch(samples, data, parameters)
    one = {
        "data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths",
        "extra_info": "extra_infos",
    }  # fmt: skip
    return {name: batch[many][0] for name, many in one.items()}


def _verl_batch(samples: Sequence[Sample], data: Data, parameters: Parameters) -> dict[str, Any]:
    return {
        "data_sources": [s["extra"].get("data_source", data.task) for s in samples],
        "solution_strs": [s["completion"] for s in samples],
        "ground_truths": [s["answer"] for s in samples],
        "extra_infos": [s["extra"].get("extra_info", dict(s["extra"])) for s in samples],
    }


@dataclass(frozen=True)
class Form:
    """One row of the table. `whole`: called with all samples of a group; `reward`: the key of a dict's reward."""

    name: str
    key: str
    fixed: tuple[str, ...]
    offer: Callable[[Sequence[Sample], Data, Parameters], dict[str, Any]]
    whole: bool = False
    reward: str = "reward"
    columns: bool = True
    strict: bool = True  # every entry of a returned dict must be a number


SINGLE = Form("one completion", "completion", ("completion", "answer", "prompt", "truncated"), _single)
GROUP = Form("a group", "completions", ("completions", "answers", "answer", "prompts", "truncated"), _group, True)
TRL = Form("TRL", "completions", GROUP.fixed, _trl, True)
VERL = Form(
    "verl", "solution_str", ("data_source", "solution_str", "ground_truth", "extra_info"), _verl,
    reward="score", columns=False, strict=False,
)  # fmt: skip
VERL_BATCH = Form(
    "verl, a batch", "solution_strs", ("data_sources", "solution_strs", "ground_truths", "extra_infos"), _verl_batch,
    True, reward="score", columns=False, strict=False,
)  # fmt: skip


def recognise(parameters: Parameters, name: str) -> Form:
    """The form that a function's parameter names say; LookupError for none, or for two at once."""
    names = parameters.names
    found = [f for f in (VERL_BATCH, VERL, GROUP, SINGLE) if f.key in names]
    if len(found) > 1:
        both = " and ".join(repr(f.key) for f in found)
        raise LookupError(f"{name!r} takes both {both}, one form each; it must take one of: {FORMS}")
    if found:
        return TRL if found[0] is GROUP and "answers" not in names else found[0]
    if ((parameters.any_number or parameters.rest) and not parameters.required) or _by_position(parameters):
        return SINGLE
    raise LookupError(f"{name!r} takes no completion{_hint(names)}; it must be one of: {FORMS}")


def _by_position(parameters: Parameters) -> bool:
    """Two parameters, of which `/` says that their names don't count: completion and answer, in this order."""
    return bool(parameters.by_position) and not set(parameters.names[:2]) & set(SINGLE.fixed)


def _hint(names: Sequence[str]) -> str:
    meant = [f"rename {n!r} to {_MEANT[n]!r}" for n in names if n in _MEANT]
    return f" ({', '.join(meant)})" if meant else ""


def _check_required(parameters: Parameters, form: Form, data: Data, name: str, skip: Sequence[str]) -> None:
    columns = data.columns
    known = {*form.fixed, *skip, *([data.answer_column] if data.answer_column and form.columns else [])}
    wanted = [n for n in parameters.required if n not in known]
    missing = wanted if not form.columns else [n for n in wanted if columns is not None and n not in columns]
    if missing:
        offered = [*form.fixed, *(sorted(columns or ()) if form.columns else [])]
        more = " and the columns of the data" if form.columns and not columns else ""
        raise LookupError(
            f"{name!r} asks for {', '.join(map(repr, missing))}, which is nothing that a function of the form "
            f"'{form.name}' is handed{_hint(missing)}: there are {', '.join(dict.fromkeys(offered))}{more}; "
            "rename what has another name here, or give it a default"
        )


class Call:
    """A function together with its form: `results(samples)` are verdicts as plain data, one for each sample."""

    def __init__(self, function: Any, name: str, data: Data) -> None:
        if inspect.isclass(function):
            raise LookupError(
                f"{name!r} is a class, not a function; name a function, or an instance that can be called"
            )
        self.function, self.data = function, data
        self.parameters = Parameters.of(function)
        self.form = recognise(self.parameters, name)
        self.asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004, an instance whose __call__ is async
        )
        self.positional = self._positional()
        _check_required(self.parameters, self.form, data, name, self.positional)
        self.loop = asyncio.new_event_loop() if self.asynchronous else None

    @property
    def whole(self) -> bool:
        """Whether it is worth to hand over a whole group: a function of lists, or an async one, called side by side."""
        return self.form.whole or self.asynchronous

    def _positional(self) -> tuple[str, ...]:
        """The names that get completion and answer by position, because nothing else is possible."""
        p = self.parameters
        if self.form is not SINGLE or "completion" in p.names:
            return ()
        return p.names[:2] if _by_position(p) else ("*",) if p.any_number else ()

    def arguments(self, samples: Sequence[Sample]) -> tuple[list[Any], dict[str, Any]]:
        """What the function is called with, by position and by name."""
        offered = self.form.offer(samples, self.data, self.parameters)
        p, first = self.parameters, []
        if self.positional:
            first = [offered.pop("completion"), offered.pop("answer")]
            first = first[:1] if len(self.positional) == 1 and self.positional != ("*",) else first
        for name in p.by_position if not self.positional else ():
            if name not in offered:
                break
            first.append(offered.pop(name))
        if not p.rest:
            offered = {name: value for name, value in offered.items() if name in p.names}
        return first, offered

    def results(self, samples: Sequence[Sample], limit: float, failed: Callable[[BaseException], Any]) -> list[Any]:
        """One verdict for each sample. What one of several raises becomes `failed(error)`; else it is raised."""
        if self.form.whole:
            return spread(self._finish(self._call(samples), limit), len(samples), self.form)
        if self.asynchronous:
            return self._together(samples, limit, failed)
        return [verdict(self._finish(self._call([sample]), limit), self.form) for sample in samples]

    def _call(self, samples: Sequence[Sample]) -> Any:
        first, named = self.arguments(samples)
        return self.function(*first, **named)

    def _finish(self, value: Any, limit: float) -> Any:
        if not inspect.isawaitable(value):
            return value
        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(within(value, limit))

    def _together(self, samples: Sequence[Sample], limit: float, failed: Callable[[BaseException], Any]) -> list[Any]:
        async def one(sample: Sample) -> Any:
            value: Awaitable[Any] = self._call([sample])
            return verdict(await within(value, limit), self.form)

        async def everyone() -> list[Any]:
            return await asyncio.gather(*(one(s) for s in samples), return_exceptions=True)

        assert self.loop is not None
        found = self.loop.run_until_complete(everyone())
        return [failed(value) if isinstance(value, BaseException) else value for value in found]


class OutOfTimeError(Exception):
    """An async function took longer than the time limit; a TimeoutError of its own is something else."""


async def within(value: Awaitable[Any], limit: float) -> Any:
    """What is awaited, or OutOfTimeError after `limit` seconds."""
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            return await value
    except TimeoutError:
        if scope.expired():
            raise OutOfTimeError from None
        raise


# ------------------------------------------------------------------------------------------------- what it returned


def spread(value: Any, count: int, form: Form) -> list[dict[str, Any]]:
    """A group's result, a list with one entry for each completion, as verdicts."""
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()  # a NumPy or torch array
    if not isinstance(value, list | tuple):
        raise TypeError(f"the returned value is a {type(value).__name__}, not a list of {count} rewards")
    if len(value) != count:
        raise ValueError(f"the function returned {len(value)} rewards for {count} completions")
    return [verdict(item, form) for item in value]


def verdict(value: Any, form: Form = SINGLE) -> dict[str, Any]:
    """One result as plain data: None and NaN abstain, a dict holds the reward and named parts."""
    if isinstance(value, dict):
        key = form.reward if form.reward in value else "reward"
        if key not in value:
            known = ", ".join(map(str, value)) or "none"
            raise TypeError(f"the returned dict has no {form.reward!r} (keys: {known})")
        parts = {part_name(k): part(v, k) for k, v in value.items() if k != key and (form.strict or _is_number(v))}
        return {**verdict(number(value[key], key)), "parts": parts}
    reward = number(value, "the returned value")
    if reward is None or math.isnan(reward):
        return {"status": "abstain", "detail": f"the function returned {'None' if reward is None else 'NaN'}"}
    if math.isinf(reward):
        raise ValueError(f"the function returned {reward}")
    return {"status": "ok", "reward": reward}


def part_name(key: Any) -> str:
    """A part's name as it stands in files: letters, digits, `_`, `.`, `-`, at most 64."""
    if not (isinstance(key, str) and _PART.fullmatch(key)):
        raise TypeError(f"{key!r} can't name a part of the reward: letters, digits, '_', '.' and '-', at most 64")
    return key


def part(value: Any, key: Any) -> float | None:
    """A part of the reward: a finite number, or None or NaN for none."""
    found = number(value, key)
    if found is not None and math.isinf(found):
        raise ValueError(f"the part {key!r} is {found}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool) or (callable(getattr(value, "item", None)) and not hasattr(value, "keys"))


def number(value: Any, what: Any) -> float | None:
    """A Python, NumPy or torch number as a float; TypeError for anything else."""
    if value is None:
        return None
    if type(value) not in (int, float, bool) and callable(getattr(value, "item", None)):
        value = value.item()  # a NumPy or torch scalar
    if type(value) not in (int, float, bool):  # the exact type: a class of the user's could claim to equal anything
        raise TypeError(f"{what} is a {type(value).__name__}, not a number")
    return float(value)
