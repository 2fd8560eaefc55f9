"""`math_verify`: mathematical equality, judged in a worker process; see `mathematics.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kenpo.experience.answers import accepted, explicit_answer, gold_text, short_line, spoken, stated_formula
from kenpo.experience.numerals import last_number, read_number
from kenpo.experience.remote import Remote
from kenpo.experience.verdict import Sample, Verdict, abstain

_LONGEST_FORMULA = 1_000
_CHECKED = 5_000  # formulas of a file that are read beforehand; what comes after them abstains when it is met


class MathVerify(Remote):
    """Mathematical equality by math_verify: LaTeX, sets, intervals, units; see `mathematics.py` for what is mended.

    The answer is what the completion states, else the last formula in math delimiters, else a text of one short line
    that is no prose, else (where the gold is a number) the last number. A list of answers accepts any of them. A gold
    that can't be read abstains for all.
    """

    name = "math_verify"

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """Golds and answer as strings of one formula each."""
        golds = [formula_of(gold) for gold in accepted(sample.answer)]
        if not golds or not all(gold.strip() for gold in golds):
            return abstain("the known answer is empty")
        if isinstance(sample.answer, bool):
            golds = ["true", "yes"] if sample.answer else ["false", "no"]
        found = stated_formula(sample.completion)
        if found is None and any(read_number(gold) for gold in golds):  # a formula is not compared with a stray number
            number = last_number(spoken(sample.completion))
            found = number.text if number else None
        elif found is None:
            found = short_line(sample.completion)
        if found is not None and len(found) > _LONGEST_FORMULA:
            found = None
        # an unreadable gold must abstain for all, so the worker looks at it before "none found" counts as wrong
        return {"gold": golds, "found": found}

    def unreadable(self, answers: Sequence[Any]) -> Mapping[int, str]:
        """Why golds can't be read, by their places in `answers`; the readable ones are left out."""
        reasons, unread = {}, []
        for i, answer in enumerate(answers):
            item = self.prepare(Sample(completion="", answer=answer))
            if isinstance(item, Verdict):
                reasons[i] = item.detail.removeprefix("the known answer ")
            elif any(read_number(gold) is None for gold in item["gold"]):
                unread.append((i, item))
        unread = unread[:_CHECKED]
        for (i, item), reply in zip(unread, self.pool.run([item for _, item in unread]), strict=True):
            if reply.get("status") != "ok":
                detail = str(reply.get("detail") or "takes too long to read")
                reasons[i] = (
                    detail.removeprefix("the known answer ")
                    if reply.get("status") == "abstain"
                    else (f"{_shown(item['gold'])} can't be read ({detail})")
                )
        return reasons


def _shown(golds: Sequence[str]) -> str:
    return repr(golds[0] if len(golds) == 1 else list(golds))[:60]


def formula_of(answer: Any) -> str:
    """A known answer as the text of one formula: after `####`, in the last box or tag, or all of it; "" for none."""
    if answer is None:
        return ""
    if not isinstance(answer, str):
        return json.dumps(answer)
    gold = gold_text(answer)
    return (explicit_answer(gold) or gold).strip()
