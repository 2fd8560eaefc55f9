"""A task read from a data file: columns, held-out split, shuffled epochs."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenpo.errors import InputError, UnknownNameError
from kenpo.experience.golds import default_verifier
from kenpo.experience.problem import Problem, Prompt
from kenpo.experience.rows import Row, is_missing, read_rows

DEFAULT_COLUMNS = ("prompt", "answer")
GSM8K_COLUMNS = ("question", "answer")
HELD_OUT_SHARE = 5  # at most one row in five is held out, however few rows there are
EVAL_ID_OFFSET = 1 << 40  # ids of an eval file's rows, so that they never equal a training row's


def prompt_key(prompt: Prompt) -> bytes:
    """A digest of a prompt's content: equal for equal prompts, the same on every machine."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class _Layout:
    prompt: str
    answer: str


class FileTask:
    """Problems of a data file, reshuffled once per epoch with a seed of its own.

    Without `eval_file` up to `heldout` rows (at most one in five) are held out: the choice depends on the prompts
    alone, never on the seed, and rows with the same prompt stay on the same side. With `eval_file` its rows are the
    held-out ones, in file order, and training rows that repeat one of its prompts are left out (`dropped` counts
    them). Raises InputError for data that can't be used.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int = 0,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        heldout: int = 500,
        eval_file: str | Path | None = None,
        system: str | None = None,
    ) -> None:
        self.name = Path(path).stem
        self.system = system
        self.seed = seed
        self.dropped = 0
        columns = (prompt_column, answer_column)
        problems = load_problems(Path(path), columns)
        if eval_file is None:
            self._train, self._heldout = split(problems, heldout)
            self._no_heldout = (
                f"{path}: no row is held out ({len(problems)} rows, heldout {heldout}); name an eval file"
            )
        else:
            self._heldout = load_problems(Path(eval_file), columns, offset=EVAL_ID_OFFSET)
            known = {prompt_key(problem.prompt) for problem in self._heldout}
            self._train = [problem for problem in problems if prompt_key(problem.prompt) not in known]
            self.dropped = len(problems) - len(self._train)
            if not self._train:
                raise InputError(f"{path}: every prompt is also in {eval_file}; nothing is left to train on")
        self.problems = problems if eval_file is None else [*problems, *self._heldout]
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._by_id = {problem.id: problem for problem in self._train}

    @functools.cached_property
    def verifier(self) -> str:
        """The verifier that the answers of the file ask for; InputError if they ask for none of ours."""
        return default_verifier(self.problems)

    @property
    def ids(self) -> Sequence[int]:
        """The ids of the training rows, in file order."""
        return [problem.id for problem in self._train]

    @property
    def size(self) -> int:
        """The number of training rows, which is the length of an epoch."""
        return len(self._train)

    def problem(self, id: int) -> Problem:
        """The training row of that id."""
        if id not in self._by_id:
            raise InputError(f"{self.name}: no training row has the id {id}")
        return self._by_id[id]

    def train(self, index: int) -> Problem:
        """The `index`-th (from 0) problem of the endless stream; each epoch is a fresh permutation of all rows."""
        if index < 0:
            raise InputError(f"{self.name}: problem index {index} is negative; the first one is 0")
        epoch, position = divmod(index, len(self._train))
        cached, order = self._order  # one tuple, so that a thread never sees half of it
        if cached != epoch:
            order = list(range(len(self._train)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._train[order[position]]

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` held-out problems (fewer if there are fewer); InputError if there is none."""
        if n < 1:
            raise InputError(f"{self.name}: asked for {n} held-out problems; ask for at least 1")
        if not self._heldout:
            raise InputError(self._no_heldout)
        return self._heldout[:n]


def split(problems: list[Problem], heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out rows. Whole prompts are held out in the order of their digests while they fit."""
    room = min(heldout, len(problems) // HELD_OUT_SHARE if len(problems) >= HELD_OUT_SHARE else len(problems) // 2)
    by_prompt: dict[bytes, list[Problem]] = {}
    for problem in problems:
        by_prompt.setdefault(prompt_key(problem.prompt), []).append(problem)
    chosen: list[Problem] = []
    for key in sorted(by_prompt):
        if len(chosen) + len(by_prompt[key]) <= room:
            chosen += by_prompt[key]
    ids = {problem.id for problem in chosen}
    return [problem for problem in problems if problem.id not in ids], chosen


def load_problems(path: Path, columns: tuple[str, str], *, offset: int = 0) -> list[Problem]:
    """The rows of a file as problems, checked one by one; `id` is `offset` plus the row's index from 0."""
    rows = read_rows(path)
    layout = _layout(path, rows, columns)
    return [_problem(path, row, layout, offset + i) for i, row in enumerate(rows)]


def _layout(path: Path, rows: list[Row], columns: tuple[str, str]) -> _Layout:
    present = set(rows[0].values)
    if columns == DEFAULT_COLUMNS and "prompt" not in present and present >= set(GSM8K_COLUMNS):
        return _Layout(*GSM8K_COLUMNS)
    everywhere = {name for row in rows for name in row.values}
    for option, name in zip(("prompt", "answer"), columns, strict=True):
        if not any(pick(row.values, name) is not None for row in rows):
            listed = ", ".join(sorted(everywhere)) or "none"
            mend = f"set the {option} column to one of them"
            raise UnknownNameError(f"{path}: no column {name!r}; the columns are {listed}; {mend}")
    return _Layout(*columns)


def _problem(path: Path, row: Row, layout: _Layout, number: int) -> Problem:
    where = f"{path}: {row.place}"
    prompt, answer = pick(row.values, layout.prompt), pick(row.values, layout.answer)
    check_prompt(prompt, where, layout.prompt)
    if is_missing(answer):
        state = "no" if answer is None and layout.answer not in row.values else "an empty"
        state = "NaN as" if isinstance(answer, float) else state
        raise InputError(f"{where}: {state} answer (column {layout.answer!r}); give it one or remove the row")
    extra = {name: value for name, value in row.values.items() if name not in (layout.prompt, layout.answer)}
    return Problem(id=number, prompt=prompt, answer=answer, extra=extra, place=where)


def pick(values: Mapping[str, Any], name: str) -> Any:
    """A column by its name, or a part of an object by its path, as `reward_model.ground_truth`; None without it."""
    if name in values:
        return values[name]
    value: Any = values
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_prompt(prompt: Any, where: str, column: str) -> None:
    """InputError, with the row's place, unless `prompt` is a text or a list of chat messages without an answer."""
    if is_missing(prompt):
        raise InputError(f"{where}: no prompt (column {column!r} is missing or empty); give it one or remove the row")
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        kind = type(prompt).__name__
        raise InputError(f"{where}: column {column!r} holds a {kind}; a prompt is a string or a list of chat messages")
    for i, message in enumerate(prompt, 1):
        good = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not good or not isinstance(message.get("content"), str):
            shape = '{"role": "user", "content": "…"}'
            raise InputError(f"{where}: message {i} of column {column!r} is not of the form {shape}")
    if prompt[-1]["role"] == "assistant":
        raise InputError(
            f"{where}: column {column!r} ends with the assistant's message, which would stand in the prompt; take it "
            "off, or put it into a column of its own (--answer-column)"
        )
