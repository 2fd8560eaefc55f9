"""Verifiers that compare plainly in this process: `exact`, `numeric`, `gsm8k`."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from kenpo.experience.answers import Stated, accepted, choice, gold_text, sentence_end, spoken, statements
from kenpo.experience.numerals import Found, last_number, padded_digits, read_number, same_number, stated_number
from kenpo.experience.remarks import explanations, without_explanation
from kenpo.experience.verdict import NO_ANSWER, InProcess, Sample, Verdict, abstain, judged
from kenpo.experience.wrappers import LONGEST, unwrap

_SHORT = 200  # characters of a completion that may be the answer as a whole, with its explanation


class Exact(InProcess):
    """The text must equal the answer: what the completion states (tag, box, `####`, "answer:") or the whole of it.

    Wrapping is taken off, a final stop and an explanation after the answer as well; runs of blanks count as one,
    Unicode is composed (NFC), case matters. `(B)`, `B.` and `B) Paris` are the choice B. A list of answers accepts any
    of them; a boolean is yes or no, true or false. Another answer that is not text is compared as a JSON value of the
    same type. An answer without content abstains.
    """

    name = "exact"

    def judge(self, sample: Sample) -> Verdict:
        """1 if the whole text or the stated answer is the gold, else 0."""
        golds = accepted(sample.answer)
        reason = next((reason for reason in map(self.refusal, golds) if reason), None if golds else "is missing")
        if reason:
            return abstain(f"the known answer {reason}")
        text = spoken(sample.completion)
        stated = next(iter(statements(text)), None)
        whole = _squeeze(text)
        if any(_same(whole, gold) for gold in golds):
            return judged(True, whole[:_SHORT])
        found = _squeeze(stated.content) if stated else whole[:_SHORT]
        right = any(_same(candidate, gold) for candidate in _candidates(text, stated) for gold in golds)
        return judged(right, found) if found else Verdict(0.0, "ok", None, NO_ANSWER)

    def refusal(self, answer: Any) -> str | None:
        """Why one known answer can't be compared with a text; None if it can."""
        if answer is None:
            return "is missing"
        return "is empty" if isinstance(answer, str) and not answer.strip() else None


def _candidates(text: str, stated: Stated | None) -> Iterator[str]:
    """The statement, and the beginnings of its line (or of a short whole text) that end a sentence or a clause."""
    if stated is not None:
        yield stated.content
        yield without_explanation(stated.content)
    line = stated.line if stated else text.strip()
    if not line or "\n" in line or len(line) > _SHORT:
        return
    end = 0
    while end < len(line):
        end, _ = sentence_end(line, end)
        yield line[:end]
        end += 1
    yield from (line[:end] for end in explanations(line))


def _same(text: str, gold: Any) -> bool:
    """Whether one text is the one gold value."""
    plain = _squeeze(unwrap(text))
    if isinstance(gold, bool):
        return plain.lower() in (("true", "yes") if gold else ("false", "no"))
    if not isinstance(gold, str):
        return _same_json(text, gold) or _same_json(plain, gold)
    return any(_same_text(text, plain, wanted) for wanted in {gold, gold_text(gold)})


def _same_text(text: str, plain: str, gold: str) -> bool:
    wanted = _squeeze(unwrap(gold))
    if _squeeze(text) == _squeeze(gold) or (plain and plain == wanted):
        return True
    given, right = choice(text), choice(gold)
    if given is None:
        return right is not None and bool(right.text) and plain == _squeeze(right.text)
    if right is None:
        return bool(given.text) and _squeeze(given.text) == wanted
    both = bool(given.text) and bool(right.text)
    return given.letter == right.letter and (not both or _squeeze(given.text) == _squeeze(right.text))


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


class Numeric(InProcess):
    """The number that the completion states, or else the last number of the text, must be the gold number.

    Whole numbers must be equal, others within 1e-6 of the gold's size. A statement of a larger expression (`3*4`,
    `3\\pi`) or of alternatives (`3 or 4`) is no answer. A gold that is not one number abstains; one with a leading zero
    (`007`) is text and compared by its digits. A list of answers accepts any of them.
    """

    name = "numeric"

    def judge(self, sample: Sample) -> Verdict:
        """1 if the number is the gold, 0 if it is not or none is found."""
        golds = accepted(sample.answer)
        reason = next((reason for reason in map(self.refusal, golds) if reason), None if golds else "is missing")
        if reason:
            return abstain(f"the known answer {reason}")
        found = found_number(sample.completion)
        if found is None:
            return Verdict(0.0, "ok", None, NO_ANSWER)
        return judged(any(self._same(gold, found) for gold in golds), found.text)

    def refusal(self, answer: Any) -> str | None:
        """Why one known answer is no number; None if it is one."""
        answer = self.gold(answer)
        number = padded_digits(answer) or read_number(answer)
        return None if number is not None else f"{_shown(answer)} is not a number"

    def gold(self, answer: Any) -> Any:
        """The part of the known answer that holds the number."""
        return gold_text(answer) if isinstance(answer, str) else answer

    def _same(self, answer: Any, found: Found) -> bool:
        gold = self.gold(answer)
        digits = padded_digits(gold)
        if digits is not None:
            return found.text == digits
        number = read_number(gold)
        return number is not None and same_number(number, found)


class Gsm8k(Numeric):
    """`numeric`, for known solutions that end in `#### 42`. (All of our verifiers read such golds the same way.)"""

    name = "gsm8k"


def found_number(completion: str) -> Found | None:
    """The number that a completion states, else its last number; None if it states something else or has none."""
    text = spoken(completion)
    for stated in statements(text):
        if any(character.isdigit() for character in stated.content) and stated.kind != "remark":
            short = without_explanation(stated.content[:LONGEST])
            return stated_number(short) or stated_number(stated.content)
        if stated.kind in ("tag", "box"):
            return None
    return last_number(text)


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"
