"""The known answers of a data file: which verifier they ask for, and the refusal of what a verifier can't read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kenpo.errors import InputError
from kenpo.experience.answers import accepted, gold_after_marker
from kenpo.experience.numerals import padded_digits, parse_number
from kenpo.experience.problem import Problem


class ReadsGolds(Protocol):
    """A verifier that can tell beforehand which known answers it can't read."""

    name: str

    def unreadable(self, answers: Sequence[Any]) -> Mapping[int, str]:
        """Reasons, by places in `answers`; readable ones are left out."""
        ...


def default_verifier(problems: Sequence[Problem]) -> str:
    """The verifier that the answers of a file ask for; a list of answers counts as each of them.

    `gsm8k` when they end in `#### 42`, `numeric` when all are numbers, `math_verify` when some hold LaTeX ($ or a
    backslash), `exact` otherwise: words, letters, booleans, digits with a leading zero. InputError for an object, and
    when only some rows have the `####` marker.
    """
    refuse_objects(problems)
    answers = [answer for problem in problems for answer in accepted(problem.answer)]
    marked = [all(_marked(answer) for answer in accepted(problem.answer)) for problem in problems]
    if any(marked):
        if not all(marked):
            place = problems[marked.index(False)].place
            raise InputError(f"{place} has no answer after '####' as other rows do; mend or remove it")
        return "gsm8k"
    if all(parse_number(answer) is not None and padded_digits(answer) is None for answer in answers):
        return "numeric"
    if any(isinstance(answer, str) and ("\\" in answer or "$" in answer) for answer in answers):
        return "math_verify"
    return "exact"


def _marked(answer: Any) -> bool:
    return isinstance(answer, str) and gold_after_marker(answer) is not None


def refuse_objects(problems: Sequence[Problem]) -> None:
    """InputError for the first answer that is an object: a verifier of ours can't know which part is the answer."""
    for problem in problems:
        for answer in accepted(problem.answer):
            if isinstance(answer, Mapping):
                keys = ", ".join(map(str, answer)) or "none"
                raise InputError(
                    f"{problem.place}: the answer is an object (keys: {keys}); name the part that is the answer, as in "
                    "--answer-column reward_model.ground_truth, or judge it by a function of your own"
                )


def check_golds(verifier: ReadsGolds, problems: Sequence[Problem]) -> None:
    """InputError for known answers that the verifier can't read: the first by its row, and how many there are."""
    refuse_objects(problems)
    found = verifier.unreadable([problem.answer for problem in problems])
    if found:
        first = min(found)
        others = f" ({len(found)} rows have such answers)" if len(found) > 1 else ""
        raise InputError(
            f"{problems[first].place}: verifier {verifier.name}: the known answer {found[first]}{others}; "
            "mend or remove it, or name another verifier"
        )
