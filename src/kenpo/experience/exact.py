"""Verifiers that compare plainly in this process: `exact`, `numeric`, `gsm8k`."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from kenpo.experience.answers import explicit_answer, gold_after_marker
from kenpo.experience.numerals import close, last_number, parse_number, stated_number
from kenpo.experience.verdict import NO_ANSWER, InProcess, Sample, Verdict, abstain, judged


class Exact(InProcess):
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
                return abstain("the known answer is empty")
            same = [text == gold for text in (whole, _squeeze(stated or ""))]
        elif sample.answer is None:
            return abstain("the known answer is missing")
        else:
            same = [_same_json(text, sample.answer) for text in (whole, stated or "")]
        found = stated if stated is not None and not same[0] else whole[:200]
        return judged(any(same), found) if found else Verdict(0.0, "ok", None, NO_ANSWER)


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
    """The number stated by the last explicit form, or the last number of the text, must be the gold number.

    Whole numbers must be equal, others within 1e-6 of the gold's size. An explicit form that states a larger expression
    (`3*4`, `3\\pi`) is no answer. A gold that is not one number abstains.
    """

    name = "numeric"

    def judge(self, sample: Sample) -> Verdict:
        """1 if the number is the gold, 0 if it is not or none is found."""
        gold = parse_number(self.gold(sample.answer))
        if gold is None:
            return abstain(f"the known answer {_shown(sample.answer)} is not a number")
        stated = explicit_answer(sample.completion)
        if stated is not None and any(character.isdigit() for character in stated):
            found = stated_number(stated)
        else:
            found = last_number(sample.completion)
        if found is None:
            return Verdict(0.0, "ok", None, NO_ANSWER)
        return judged(close(gold=gold, answer=found.value), found.text)

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
