"""Supervised texts: where they come from, how they become tokens, and how rows of tokens become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kenpo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text(NamedTuple):
    """A prompt (plain text or chat messages), the response to learn, and where it was read (for messages)."""

    prompt: str | list[dict[str, Any]]
    response: str
    where: str


class Source(Protocol):
    """An endless, deterministic stream of texts: the `index`-th one depends on the seed and `index` alone."""

    def text(self, index: int) -> Text: ...


class AdditionSource:
    """Demonstrations of the built-in task, a share of which ignores every carry."""

    def __init__(self, seed: int, dropped: float) -> None:
        self.seed, self.dropped = seed, dropped

    def text(self, index: int) -> Text:
        """The `index`-th demonstration of an endless stream."""
        from kenpo.experience.addition import demonstration

        return Text(*demonstration(self.seed, index, self.dropped), where=f"demonstration {index}")


class FileSource:
    """Rows of a .jsonl, .json or .parquet file, in a fresh seeded order each time through."""

    def __init__(self, path: str, prompt_column: str, response_column: str, seed: int) -> None:
        self.rows = read_texts(path, prompt_column, response_column)
        self.seed = seed
        self._epoch, self._order = -1, []  # type: tuple[int, list[int]]

    def text(self, index: int) -> Text:
        """The `index`-th row of an endless stream."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            # seeds of neighbouring epochs and runs must not meet, hence the odd factor
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=generator).tolist()
        return self.rows[self._order[place]]


def read_texts(path: str, prompt_column: str, response_column: str) -> list[Text]:
    """All rows of a data file; `InputError` names the file, the row and the column that is wrong."""
    from kenpo.experience.rows import read_rows

    return [_text(row.values, f"{path}: {row.place}", prompt_column, response_column) for row in read_rows(Path(path))]


def _text(row: dict[str, Any], where: str, prompt_column: str, response_column: str) -> Text:
    for column, option in ((prompt_column, "--prompt-column"), (response_column, "--response-column")):
        if column not in row:
            listed = ", ".join(row) or "none"
            raise InputError(f"{where}: no column {column!r}; the columns are {listed}; choose one with {option}")
    prompt, response = row[prompt_column], row[response_column]
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not prompt or not (isinstance(prompt, str) or messages):
        raise InputError(
            f"{where}: column {prompt_column!r} must hold a text or a list of chat messages, and not be empty"
        )
    if not isinstance(response, str) or not response:
        raise InputError(f"{where}: column {response_column!r} must hold a text that is not empty")
    return Text(prompt, response, where)


class Row(NamedTuple):
    """Token ids of one prompt and response, the end-of-sequence id last; the first `prompt` ids are not trained on."""

    ids: list[int]
    prompt: int


def encode(tokenizer: PreTrainedTokenizerBase, text: Text, context: int | None) -> Row:
    """The ids the policy will see when it is sampled from this prompt, then the response and its end.

    Prompt and response are tokenised apart, because sampling also starts after a finished prompt. Raises `InputError`
    for a text longer than the context (nothing is cut) and for characters that the tokenizer does not know.
    """
    from kenpo.models.loading import encode_prompt

    prompt = encode_prompt(tokenizer, text.prompt)
    if not prompt:
        raise InputError(f"{text.where}: the prompt has no tokens; a response needs at least one token before it")
    response = tokenizer(text.response, add_special_tokens=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in prompt + response:
        raise InputError(f"{text.where}: holds characters that the tokenizer does not know; choose another --tokenizer")
    ids = [*prompt, *response, tokenizer.eos_token_id]
    if context is not None and len(ids) > context:
        raise InputError(
            f"{text.where}: {len(ids)} tokens do not fit the model's context of {context}; shorten the row"
        )
    return Row(ids, len(prompt))


def collate(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Tokens [B,T] int64 padded with -1 on the right, and mask [B,T] bool: true on responses and their end.

    The mask follows from lengths, never from token ids: a pad id equal to the end's id can't blur it.
    """
    width = max(len(row.ids) for row in rows)
    tokens = torch.full((len(rows), width), -1, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens[b, : len(row.ids)] = torch.tensor(row.ids)
        mask[b, row.prompt : len(row.ids)] = True
    return tokens, mask
