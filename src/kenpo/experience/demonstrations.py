"""Supervised rollouts: prompts with the responses to learn, from the addition task or a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError, TooLongError
from kenpo.experience.episode import Row as Sampled
from kenpo.experience.episode import build_rollouts
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.files import HELD_OUT_SHARE, check_prompt, prompt_key, told
from kenpo.experience.layouts import Layout, find_layout
from kenpo.experience.rows import Row
from kenpo.experience.shards import Spec, read_rows
from kenpo.experience.source import Collected, Priorities, Score, Source, State, Usable
from kenpo.models.loading import check_characters, encode_prompt
from kenpo.types import Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text(NamedTuple):
    """A prompt (plain text or chat messages), the response to learn, and where it was read (for messages)."""

    prompt: str | list[dict[str, Any]]
    response: str
    where: str


class Texts(Protocol):
    """An endless, deterministic stream of texts: the `index`-th one depends on the seed and `index` alone."""

    rows: Sequence[Text]
    """All texts of a finite stream, to be checked beforehand; empty for an endless one."""
    heldout: Sequence[Text]
    """Texts that the stream never gives."""
    notes: Sequence[str]
    """What the one who starts a run should know of the data."""

    def leave_out(self, unfit: Callable[[Text], bool]) -> None:
        """Go on without the texts that are `unfit`, and note their number. InputError where none can be left out."""
        ...

    def text(self, index: int) -> Text:
        """The `index`-th text from 0."""
        ...


class AdditionTexts:
    """Demonstrations of the built-in task, a share of which ignores every carry."""

    rows: Sequence[Text] = ()
    heldout: Sequence[Text] = ()
    notes: Sequence[str] = ()

    def __init__(self, seed: int, dropped: float) -> None:
        self.seed, self.dropped = seed, dropped

    def leave_out(self, unfit: Callable[[Text], bool]) -> None:
        """Refused: the texts are made one by one."""
        raise InputError("--long-prompts skip: the addition demonstrations are made one by one; it is for data files")

    def text(self, index: int) -> Text:
        """The `index`-th demonstration of an endless stream."""
        from kenpo.experience.addition import demonstration

        return Text(*demonstration(self.seed, index, self.dropped), where=f"demonstration {index}")


class FileTexts:
    """Rows of data as `read_rows` takes them, in a fresh seeded order each time through.

    Without `eval_file` up to `heldout` rows (at most one in five) are held out; the choice depends on the prompts
    alone. With `eval_file` its first `heldout` rows are (of each file). Raises `InputError` naming file, row, column.
    """

    def __init__(
        self, path: Spec, prompt_column: str, response_column: str, seed: int, heldout: int = 0,
        eval_file: Spec | None = None,
    ) -> None:  # fmt: skip
        rows = read_texts(path, prompt_column, response_column)
        self.rows: Sequence[Text]
        self.heldout: Sequence[Text]
        self.notes: Sequence[str] = ()
        if eval_file is None:
            self.rows, self.heldout = split(rows, heldout)
        else:
            files = [eval_file] if isinstance(eval_file, str | Path) else eval_file
            held = [read_texts(file, prompt_column, response_column)[:heldout] for file in files]
            self.rows, self.heldout = rows, [text for texts in held for text in texts]
        self.seed = seed
        self._epoch, self._order = -1, []  # type: tuple[int, list[int]]

    def leave_out(self, unfit: Callable[[Text], bool]) -> None:
        """Go on without the rows that are `unfit`. InputError if none is left to train on."""
        kept, held = ([t for t in texts if not unfit(t)] for texts in (self.rows, self.heldout))
        gone = len(self.rows) - len(kept), len(self.heldout) - len(held)
        if not kept:
            raise InputError(f"{self.rows[0].where}: no row fits the model's context; nothing is left to train on")
        if any(gone):
            self.notes = [f"left out {gone[0]} training and {gone[1]} held-out rows longer than the model's context"]
        self.rows, self.heldout, self._epoch = kept, held, -1

    def text(self, index: int) -> Text:
        """The `index`-th row of an endless stream."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            # seeds of neighbouring epochs and runs must not meet, hence the odd factor
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=generator).tolist()
        return self.rows[self._order[place]]


class _Prompted(Protocol):
    @property
    def prompt(self) -> str | list[dict[str, Any]]: ...


_Row = TypeVar("_Row", bound=_Prompted)


def split(rows: list[_Row], heldout: int) -> tuple[list[_Row], list[_Row]]:
    """Training and held-out rows; rows with one prompt stay on one side, chosen by the digests of the prompts."""
    room = min(heldout, len(rows) // HELD_OUT_SHARE)
    by_prompt: dict[bytes, list[int]] = {}
    for i, row in enumerate(rows):
        by_prompt.setdefault(prompt_key(row.prompt), []).append(i)
    chosen: set[int] = set()
    for key in sorted(by_prompt):
        if len(chosen) + len(by_prompt[key]) <= room:
            chosen.update(by_prompt[key])
    return [r for i, r in enumerate(rows) if i not in chosen], [r for i, r in enumerate(rows) if i in chosen]


def read_texts(spec: Spec, prompt_column: str, response_column: str) -> list[Text]:
    """All rows of data with responses; `InputError` names the file, the row and the column that is wrong.

    Of a conversation (`messages`, ShareGPT's `conversations`) the last turn is the response, the rest the prompt.
    """
    rows = read_rows(spec)
    columns = {name for row in rows for name in row.values}
    layout = find_layout(told(spec), columns, prompt_column, response_column, supervised=True)
    return [_text(row, layout) for row in rows]


def _text(row: Row, layout: Layout) -> Text:
    prompt, response = layout.read(row.values, row.place)
    check_prompt(prompt, row.place, layout.prompt)
    if isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict):  # one message
        response = response[0].get("content") if response[0].get("role") == "assistant" else None
    if not isinstance(response, str) or not response:
        raise InputError(f"{row.place}: column {layout.target!r} must hold a text that is not empty")
    return Text(prompt, response, row.place)


def encode(
    tokenizer: PreTrainedTokenizerBase, text: Text, context: int | None = None, system: str | None = None
) -> Episode:
    """The ids the policy will see when it is sampled from this prompt, then the response and its end.

    Prompt and response are tokenised apart, because sampling also starts after a finished prompt. Raises `InputError`
    for a text longer than the context (nothing is cut) and for characters that the tokenizer does not know.
    """
    try:
        prompt = encode_prompt(tokenizer, text.prompt, system)
        check_characters(text.response, "the response")
        response = tokenizer(unopened(tokenizer, prompt, text.response), add_special_tokens=False)["input_ids"]
    except InputError as error:
        raise InputError(f"{text.where}: {error}") from None
    if not prompt:
        raise InputError(f"{text.where}: the prompt has no tokens; a response needs at least one token before it")
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in prompt + response:
        raise InputError(f"{text.where}: holds characters that the tokenizer does not know; choose another model")
    end = tokenizer.eos_token_id
    response = response if response and response[-1] == end else [*response, end]  # some data write the end themselves
    if context is not None and len(prompt) + len(response) > context:
        raise TooLongError(
            f"{text.where}: {len(prompt) + len(response)} tokens do not fit the model's context of {context}; "
            "shorten the row, or leave such rows out (--long-prompts skip)"
        )
    return Episode((given(prompt), Segment(response, sampled=True)), text=text.response)


def unopened(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], response: str) -> str:
    """`response` without an opening tag that the chat template has written already at the prompt's end (<think>)."""
    tail = str(tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)).rstrip()
    opened = re.search(r"<(\w+)>$", tail)
    return response.removeprefix(opened[0]).lstrip("\n") if opened and response.startswith(opened[0]) else response


@dataclass(frozen=True)
class DemonstrationOptions:
    """``batch`` texts per step; ``measured`` held-out texts scored at once; ``system`` prompt of a chat template;
    ``skip_long``: texts that don't fit the model's context are left out and counted."""

    batch: int = 64
    measured: int = 256
    system: str | None = None
    dtype: torch.dtype = torch.float32
    skip_long: bool = False


class Demonstrations(Source):
    """Batches of supervised rollouts: prompts masked, responses with their end trained on, reward 0.

    Its state is ``{"cursor": n}``: the index of the next unused text. Held out it measures the loss, in nats per token,
    and with an `evaluator` the greedy accuracy on a task's problems; `summary.json` holds the accuracy if there is one.
    Every text of a file is encoded when the source is made, so that a bad row stops a run before its first step.
    """

    def __init__(
        self, texts: Texts, tokenizer: PreTrainedTokenizerBase, context: int | None, options: DemonstrationOptions,
        evaluator: Evaluator | None = None,
    ) -> None:  # fmt: skip
        if tokenizer.eos_token_id is None:
            raise InputError("tokenizer: has no end-of-sequence token, so no response could ever end; add one to it")
        self.texts, self.tokenizer, self.context, self.options = texts, tokenizer, context, options
        self.evaluator = evaluator
        if options.skip_long:
            texts.leave_out(self._too_long)
        self.notes = getattr(texts, "notes", ())  # a stream of the user's own may have none
        for text in texts.rows or [texts.text(i) for i in range(options.batch)]:
            self._episode(text)
        self._held = [self._episode(text) for text in texts.heldout]
        self.heldout = len(self._held) + (len(evaluator.problems) if evaluator else 0)
        self.headline = "eval/accuracy" if evaluator else "eval/loss"

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The next ``batch`` texts of the stream. Refuses priorities and selection: there is nothing to choose from."""
        if priorities is not None or usable is not None:
            raise InputError("demonstrations are read in order; an algorithm that selects or prioritises needs samples")
        cursor = int((state or {}).get("cursor", 0))
        numbers = range(cursor, cursor + self.options.batch)
        rollouts = self._rollouts([self._episode(self.texts.text(i)) for i in numbers], cursor)
        tokens = int(rollouts.mask.sum())
        figures = {"length": {"sum": tokens, "count": len(rollouts)}}
        return Collected(rollouts, figures=figures, state={"cursor": cursor + self.options.batch})

    def measure(self, score: Score) -> dict[str, Any]:
        """Held-out loss and, with a task, its accuracy."""
        figures = self.evaluator.measure() if self.evaluator else {}
        if not self._held:
            return figures
        total, count = 0.0, 0
        for start in range(0, len(self._held), self.options.measured):
            rollouts = self._rollouts(self._held[start : start + self.options.measured], start)
            logp = score(rollouts).logp
            assert logp is not None
            total -= float(logp.cpu()[rollouts.mask].double().sum())
            count += int(rollouts.mask.sum())
        return {**figures, "eval/loss": {"sum": total, "count": count}}

    def _too_long(self, text: Text) -> bool:
        try:
            self._episode(text)
        except TooLongError:
            return True
        return False

    def _episode(self, text: Text) -> Episode:
        return encode(self.tokenizer, text, self.context, self.options.system)

    def _rollouts(self, episodes: Sequence[Episode], first: int) -> Rollouts:
        rows = [Sampled(e, group, reward=0.0, prompt_id=first + group) for group, e in enumerate(episodes)]
        return build_rollouts(rows, without=("logp_sampler", "policy_version"), dtype=self.options.dtype)
