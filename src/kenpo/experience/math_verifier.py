"""`math_verify`: mathematical equality, judged in a worker process; see `mathematics.py`."""

from __future__ import annotations

import json
from typing import Any

from kenpo.experience.answers import explicit_answer, gold_after_marker, stated_formula
from kenpo.experience.numerals import last_number, parse_number
from kenpo.experience.remote import Remote
from kenpo.experience.verdict import Sample, Verdict, abstain

_LONGEST_FORMULA = 1_000


class MathVerify(Remote):
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
            return abstain("the known answer is empty")
        found = stated_formula(sample.completion)
        if found is None and parse_number(gold) is not None:  # a formula is not compared with a stray number
            number = last_number(sample.completion)
            found = number.text if number else None
        if found is None or len(found) > _LONGEST_FORMULA:
            # an unreadable gold must abstain for all, so the worker looks at it before this counts as wrong
            return {"gold": gold, "found": None}
        return {"gold": gold, "found": found}
