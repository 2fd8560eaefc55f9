"""Pairs of responses of which one is preferred: read from a file, or bundled with the addition task.

A pair without a difference teaches nothing: one whose two responses are equal, or in which one is empty, is left out
and counted, or refused (``unusable``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kenpo.errors import InputError
from kenpo.experience.demonstrations import split
from kenpo.experience.files import HELD_OUT_SHARE, check_prompt, told
from kenpo.experience.rows import is_missing
from kenpo.experience.shards import Spec, read_rows
from kenpo.models.loading import BUNDLED
from kenpo.seeds import stable_seed

FLIPPED = 0.1  # share of the bundled training pairs that are swapped
BUNDLED_PAIRS = BUNDLED / "pairs.jsonl"

Prompt = str | list[dict[str, Any]]


class Pair(NamedTuple):
    """A prompt (plain text or chat messages), the better and the worse response, where they were read, and by how much
    the first is better (None: nobody said)."""

    prompt: Prompt
    chosen: str
    rejected: str
    where: str
    margin: float | None = None


class Columns(NamedTuple):
    """Columns of a file of pairs."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


USUAL = Columns()


class PairStream:
    """Training pairs in a fresh seeded order each time through, and held-out ones; ``skipped`` were unusable.

    The `index`-th pair depends on the seed and `index` alone. Raises `InputError` if there is nothing to train on.
    """

    def __init__(self, rows: Sequence[Pair], heldout: Sequence[Pair], seed: int, skipped: int = 0) -> None:
        if not rows:
            raise InputError("pairs: none is left to train on")
        self.rows, self.heldout, self.seed, self.skipped = rows, heldout, seed, skipped
        self._epoch, self._order = -1, []  # type: tuple[int, list[int]]

    def place(self, index: int) -> int:
        """Which row is the `index`-th of the endless stream."""
        epoch, at = divmod(index, len(self.rows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch, 0x7061))
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=generator).tolist()
        return self._order[at]


def bundled_pairs(seed: int, flipped: float, heldout: int) -> PairStream:
    """Samples of the bundled model that the addition task's verifier told apart. A share `flipped` of the training
    pairs, chosen by the seed, is swapped; held-out pairs are as the verifier says."""
    train, held = [], []
    for number, row in enumerate(read_rows(str(BUNDLED_PAIRS))):
        values = row.values
        pair = Pair(values["prompt"], values["chosen"], values["rejected"], f"bundled pair {number + 1}")
        if values.get("heldout"):
            held.append(pair)
            continue
        swap = stable_seed(seed, number, 0x666C) % 10**6 < flipped * 10**6
        train.append(pair._replace(chosen=pair.rejected, rejected=pair.chosen) if swap else pair)
    return PairStream(train, held[:heldout], seed)


def file_pairs(
    path: Spec, columns: Columns, seed: int, heldout: int = 0, eval_file: Spec | None = None, unusable: str = "skip"
) -> PairStream:
    """Rows of data as `read_rows` takes them.

    Without `eval_file` up to `heldout` rows (at most one in five) are held out; the choice depends on the prompts
    alone. With `eval_file` its first `heldout` rows are. Raises `InputError` naming file, row and column.
    """
    rows, skipped = read_pairs(path, columns, unusable)
    if eval_file is None:
        if heldout and len(rows) < HELD_OUT_SHARE:
            heldout = 0
        train, held = split(rows, heldout)
        return PairStream(train, held, seed, skipped)
    return PairStream(rows, read_pairs(eval_file, columns, unusable)[0][:heldout], seed, skipped)


def read_pairs(path: Spec, columns: Columns, unusable: str = "skip") -> tuple[list[Pair], int]:
    """(usable pairs of a file, number of those left out); with "refuse" the first unusable one is an `InputError`."""
    found, skipped = [], 0
    for row in read_rows(path):
        pair = read_pair(row.values, row.place, columns)
        why = reason_against(pair)
        if why and unusable == "refuse":
            raise InputError(
                f"{pair.where}: {why}; mend or remove the row, or leave such rows out: --unusable-pairs skip"
            )
        skipped += bool(why)
        found += [] if why else [pair]
    if not found:
        raise InputError(
            f"{told(path)}: none of the {skipped} pairs tells two responses apart (equal, or one is empty)"
        )
    return found, skipped


def reason_against(pair: Pair) -> str | None:
    """Why a pair teaches nothing, or None."""
    if not pair.chosen.strip() or not pair.rejected.strip():
        return "one of the two responses is empty"
    return "the two responses are equal" if pair.chosen == pair.rejected else None


def read_pair(row: Mapping[str, Any], where: str, columns: Columns = USUAL) -> Pair:
    """One row: responses as texts, or as lists of chat messages that end with the response.

    Without a prompt (no column, or an empty one) it is what both sides begin with: the same messages, or of texts the
    common beginning up to the last white space. `InputError` for anything else.

    >>> row = {"chosen": "Q: 1+1? A: it is 2", "rejected": "Q: 1+1? A: it is 3"}
    >>> read_pair(row, "row 1")[:3]
    ('Q: 1+1? A: it is', ' 2', ' 3')
    """
    sides = []
    for column, option in ((columns.chosen, "--chosen-column"), (columns.rejected, "--rejected-column")):
        if column not in row:
            listed = ", ".join(row) or "none"
            raise InputError(f"{where}: no column {column!r}; the columns are {listed}; choose one with {option}")
        sides.append(_side(row[column], where, column))
    chosen, rejected = sides
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise InputError(f"{where}: one response is a text, the other a list of messages; write both the same way")
    prompt: Any = row.get(columns.prompt)
    if is_missing(prompt):
        prompt, chosen, rejected = _implicit(chosen, rejected, where)
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chosen, rejected = _last(chosen, messages, where), _last(rejected, messages, where)
        prompt = messages
    check_prompt(prompt, where, columns.prompt)
    assert isinstance(chosen, str)
    assert isinstance(rejected, str)
    return Pair(prompt, chosen, rejected, where, _margin(row.get("margin"), where))


def _side(value: Any, where: str, column: str) -> str | list[dict[str, Any]]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    shape = '{"role": "assistant", "content": "…"}'
    for message in value if isinstance(value, list) else [None]:
        said = [message.get(n) for n in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in said):
            raise InputError(f"{where}: column {column!r} must hold a text or a list of messages such as {shape}")
    return list(value)


def _implicit(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of two sides that begin with the prompt."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    same = min(len(chosen), len(rejected)) if same is None else same
    if isinstance(chosen, str):
        while same and not chosen[same - 1].isspace():
            same -= 1
        while same and chosen[same - 1].isspace():
            same -= 1
    elif same and chosen[same - 1]["role"] == "assistant":
        same -= 1  # equal sides: the last message is the response all the same
    if not same:
        raise InputError(f"{where}: there is no prompt, and the two responses have no beginning in common to be one")
    return chosen[:same], chosen[same:], rejected[same:]


def _last(side: list[dict[str, Any]], prompt: Any, where: str) -> str:
    """The response in messages that hold it alone, or after the prompt."""
    rest = side[len(prompt) :] if side[: len(prompt)] == prompt else side
    if not rest:
        return ""
    if len(rest) != 1 or rest[0]["role"] != "assistant":
        raise InputError(
            f"{where}: after the prompt there must be one message, the assistant's; put what comes before it into the "
            f"prompt (found: {', '.join(m['role'] for m in rest)})"
        )
    return str(rest[0]["content"])


def _margin(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InputError(f"{where}: column 'margin' holds {json.dumps(value)}, no number")
    return float(value)
