"""A task read from a data file: columns, held-out split, shuffled epochs."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.golds import default_verifier
from kenpo.experience.layouts import LAST_TURN, Layout, find_layout, keys_beside
from kenpo.experience.problem import Problem, Prompt
from kenpo.experience.rows import Row, is_missing
from kenpo.experience.shards import Spec, name_of, read_rows

HELD_OUT_SHARE = 5  # at most one row in five is held out, however few rows there are
EVAL_ID_OFFSET = 1 << 40  # ids of an eval file's rows, so that they never equal a training row's


def prompt_key(prompt: Prompt) -> bytes:
    """A digest of a prompt's content: equal for equal prompts, the same on every machine."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class FileTask:
    """Problems of a data file (or several, a folder, a data set), reshuffled once per epoch with a seed of its own.

    Without `eval_file` up to `heldout` rows (at most one in five) are held out: the choice depends on the prompts
    alone, never on the seed, and rows with the same prompt stay on the same side. With `eval_file` its rows are the
    held-out ones, in file order; several are sets with names. Training rows that repeat one of its prompts are left
    out: `notes` says how many rows were left out, and why. Raises InputError for data that can't be used.
    """

    def __init__(
        self,
        path: Spec,
        *,
        seed: int = 0,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        heldout: int = 500,
        eval_file: Spec | None = None,
        system: str | None = None,
    ) -> None:
        self.name, self.system, self.seed = name_of(path), system, seed
        self.notes: list[str] = []
        self.dropped = 0
        columns = (prompt_column, answer_column)
        problems = load_problems(path, columns)
        if eval_file is None:
            self._train, self._heldout = split(problems, heldout)
            self._no_heldout = (
                f"{told(path)}: no row is held out ({len(problems)} rows, heldout {heldout}); name an eval file, or "
                "evaluate nothing (--eval-problems 0)"
            )
        else:
            self._heldout = load_sets(eval_file, columns)
            self._no_heldout = f"{told(eval_file)}: no row is left to evaluate"
            self.notes += _capped(self._heldout, heldout, told(eval_file))
            known = {prompt_key(problem.prompt) for problem in self._heldout}
            self._train = [problem for problem in problems if prompt_key(problem.prompt) not in known]
            self.dropped = len(problems) - len(self._train)
            if self.dropped:
                self.notes.append(
                    f"{told(path)}: {self.dropped} of {len(problems)} rows repeat a prompt of {told(eval_file)} and "
                    "are not trained on"
                )
            if not self._train:
                raise InputError(
                    f"{told(path)}: every prompt is also in {told(eval_file)}; nothing is left to train on"
                )
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
        """The first `n` held-out problems of each set (fewer if there are fewer); InputError if there is none."""
        if n < 1:
            raise InputError(f"{self.name}: asked for {n} held-out problems; ask for at least 1")
        if not self._heldout:
            raise InputError(self._no_heldout)
        sets: dict[str, list[Problem]] = {}
        for problem in self._heldout:
            sets.setdefault(problem.set, []).append(problem)
        return [problem for found in sets.values() for problem in found[:n]]

    def leave_out(self, unfit: Callable[[Problem], bool], why: str) -> None:
        """Go on without the rows that are `unfit`, training and held-out ones; `notes` counts them.

        InputError if no row is left to train on.
        """
        kept, held = ([p for p in rows if not unfit(p)] for rows in (self._train, self._heldout))
        gone = (len(self._train) - len(kept), len(self._heldout) - len(held))
        if not kept:
            raise InputError(f"{self.name}: every row {why}; nothing is left to train on")
        if any(gone):
            self.notes.append(f"{self.name}: left out {gone[0]} training and {gone[1]} held-out rows: each {why}")
        self._train, self._heldout, self._order = kept, held, (-1, ())
        self._by_id = {problem.id: problem for problem in kept}


def load_sets(spec: Spec, columns: tuple[str, str]) -> list[Problem]:
    """The problems of an eval file, or of several as sets by name. InputError for two of one name."""
    if isinstance(spec, str | Path):
        return load_problems(spec, columns, offset=EVAL_ID_OFFSET)
    names = set_names([str(s) for s in spec])
    found: list[Problem] = []
    for name, one in zip(names, spec, strict=True):
        found += load_problems(one, columns, offset=EVAL_ID_OFFSET + len(found), name=name if len(names) > 1 else "")
    return found


def _capped(heldout: Sequence[Problem], most: int, where: str) -> list[str]:
    """What to say of held-out sets that are longer than what is evaluated of them."""
    counts = Counter(problem.set for problem in heldout)
    return [
        f"{name or where}: the first {most} of {count} rows are evaluated (--eval-problems)"
        for name, count in counts.items()
        if 0 < most < count
    ]


def set_names(specs: Sequence[str]) -> list[str]:
    """Each set's name: its short one, or all that was typed where two would be called alike.

    InputError for a set that is given twice.
    """
    short = [name_of(spec) for spec in specs]
    names = [spec if short.count(name) > 1 else name for spec, name in zip(specs, short, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name}: the set is given twice")
    return names


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


def load_problems(spec: Spec, columns: tuple[str, str], *, offset: int = 0, name: str = "") -> list[Problem]:
    """The rows of `spec` as problems, checked one by one; `id` is `offset` plus the row's index from 0; `name` their
    set's."""
    rows = read_rows(spec)
    layout = find_layout(told(spec), {n for row in rows for n in row.values}, *columns)
    return [_problem(row, layout, offset + i, name) for i, row in enumerate(rows)]


def _problem(row: Row, layout: Layout, number: int, name: str) -> Problem:
    prompt, answer = layout.read(row.values, row.place)
    check_prompt(prompt, row.place, layout.prompt)
    if is_missing(answer):
        if (keys := keys_beside(row.values, layout.target)) is not None:
            raise InputError(f"{row.place}: no column {layout.target!r}; its object has the keys {keys}")
        state = "no" if answer is None and layout.target not in row.values else "an empty"
        state = "NaN as" if isinstance(answer, float) else state
        raise InputError(f"{row.place}: {state} answer (column {layout.target!r}); give it one or remove the row")
    extra = {n: value for n, value in row.values.items() if n not in layout.used}
    return Problem(id=number, prompt=prompt, answer=answer, extra=extra, place=row.place, set=name)


def told(spec: Spec) -> str:
    """A data specification as messages name it."""
    return str(spec) if isinstance(spec, str | Path) else ", ".join(map(str, spec))


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
            f"off, or make it the answer: --answer-column {LAST_TURN}"
        )
