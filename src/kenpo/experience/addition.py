"""The built-in task `addition`: two 3-digit numbers, added digit by digit from the right.

``864+394=`` is answered ``4+4+0=08;6+9+0=15;8+3+1=12#1258``: for each place the two digits, the carry and their
two-digit sum, then ``#`` and the number read off the units (and the last tens). About half a million ordered pairs
exist; which of them are held out is fixed by the unordered pair alone, whatever the seed, so no supervised or RL
text ever shows a held-out sum, operands swapped or not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kenpo.errors import InputError
from kenpo.experience.problem import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOW, HIGH = 100, 999  # operands, both included
CHARACTERS = "0123456789+=;#"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
DROPPED_CARRY = 0.6  # share of the demonstrations that treat every carry as 0
RESPONSE_TOKENS = 32  # the longest right answer, its end-of-sequence token included

_SPAN = HIGH - LOW + 1
_HELD_OUT_ONE_IN = 128  # about 3,200 of the 405,450 unordered pairs
_WORD = (1 << 64) - 1
_SPLIT_KEY, _TRAIN_KEY, _DEMO_KEY = 0x5EED_0001, 0x5EED_0002, 0x5EED_0003


def _mix(*words: int) -> int:
    """A 64-bit hash of integers (splitmix64, one round per word): the same on every machine and Python version."""
    h = 0
    for word in words:
        h = (h + (word & _WORD) + 0x9E3779B97F4A7C15) & _WORD
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _WORD
        h ^= h >> 31
    return h


def is_held_out(a: int, b: int) -> bool:
    """Whether the unordered pair {a, b} belongs to the held-out side; the same for (b, a) and for every seed."""
    return _mix(_SPLIT_KEY, min(a, b), max(a, b)) % _HELD_OUT_ONE_IN == 0


@functools.cache
def _held_out_pairs() -> list[tuple[int, int]]:
    """Every held-out pair, smaller operand first, in a fixed shuffled order."""
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1) if is_held_out(a, b)]
    return sorted(pairs, key=lambda pair: _mix(_SPLIT_KEY, *pair))


def trace(a: int, b: int, *, carry: bool = True) -> str:
    """The written-out sum of two 3-digit numbers; without `carry` every carry is taken as 0 (often a wrong sum)."""
    steps, units, held = [], "", 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        total = x + y + held
        steps.append(f"{x}+{y}+{held}={total:02d}")
        units = f"{total % 10}{units}"
        held = total // 10 if carry else 0
    answer = f"{total // 10 or ''}{units}"
    return f"{';'.join(steps)}#{answer}"


def _draw(key: int, seed: int, index: int) -> tuple[int, int]:
    """Operands of draw `index`: uniform over the ordered pairs of the training side."""
    attempt = 0
    while True:
        h = _mix(key, seed, index, attempt)
        a, b = LOW + h % _SPAN, LOW + (h >> 32) % _SPAN
        if not is_held_out(a, b):
            return a, b
        attempt += 1


def _problem(a: int, b: int) -> Problem:
    worked = trace(a, b)
    columns = {
        "hint": worked, "trace": worked, "trace_logp": 0.0,  # a fixed procedure: each token had probability 1
        "valid": [a + b], "target": [1.0],
    }  # fmt: skip
    return Problem(id=a * 1000 + b, prompt=f"{a}+{b}=", answer=a + b, extra=columns)


class AdditionTask:
    """3-digit addition. The seed chooses the order of the training problems, never which problems are held out."""

    name = "addition"
    verifier = "numeric"
    system: str | None = None
    hint_template = "{hint};{prompt}"
    rephrase_templates = ("{trace};{prompt}", "{explanation};{prompt}")

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @property
    def ids(self) -> None:
        """None: the stream is endless."""
        return None

    @property
    def size(self) -> None:
        """None: the stream is endless."""
        return None

    def problem(self, id: int) -> Problem:
        """The problem of that id, which is made of its operands."""
        a, b = divmod(id, 1000)
        if not (LOW <= a <= HIGH and LOW <= b <= HIGH) or is_held_out(a, b):
            raise InputError(f"addition: no training problem has the id {id}")
        return _problem(a, b)

    def train(self, index: int) -> Problem:
        """The `index`-th (from 0) problem of an endless stream that depends on the seed and `index` alone."""
        if index < 0:
            raise InputError(f"addition: problem index {index} is negative; the first one is 0")
        return _problem(*_draw(_TRAIN_KEY, self.seed, index))

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` held-out problems in one fixed shuffled order, each unordered pair once (about 3,200 exist)."""
        if n < 1:
            raise InputError(f"addition: asked for {n} held-out problems; ask for at least 1")
        # which operand comes first is as random as it is in training
        return [_problem(*(pair if _mix(*pair) & 1 else pair[::-1])) for pair in _held_out_pairs()[:n]]


class Demonstration(NamedTuple):
    """One supervised text: the model sees `prompt` and is trained on `response`."""

    prompt: str
    response: str


def demonstration(seed: int, index: int, dropped: float = DROPPED_CARRY) -> Demonstration:
    """The `index`-th demonstration of a seed, from the training side; a share `dropped` of them ignores all carries."""
    a, b = _draw(_DEMO_KEY, seed, index)
    carry = _mix(_DEMO_KEY, index, seed) >> 11 >= dropped * (1 << 53)
    return Demonstration(f"{a}+{b}=", trace(a, b, carry=carry))


def demonstrations(seed: int, dropped: float = DROPPED_CARRY) -> Iterator[Demonstration]:
    """The endless stream `demonstration(seed, 0)`, `demonstration(seed, 1)`, …"""
    index = 0
    while True:
        yield demonstration(seed, index, dropped)
        index += 1


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of the task, with pad, end and unknown of their own; no chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
