"""`file.py:fn`: a reward function of the user's own, called by the names of its parameters in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.pool import Workers, WorkerStartError
from kenpo.experience.remote import Remote, read_answer
from kenpo.experience.verdict import Sample, Verdict

_GRACE = 1.0  # seconds for an async function to report which of its samples took too long


class UserFunction(Remote):
    """A function of one completion, of a whole group, or in TRL's or verl's form: `signatures.py` has the table.

    It returns a number, None or NaN to abstain, or a dict with `reward` and named parts; for a group a list of these.
    Whatever it raises is a verdict with status "error". Loaded at once in a worker; InputError if that fails, or if its
    parameters fit no form. `columns` are the data's (None: unknown), `answer_column` the name of the one with the
    answer, which is handed over under that name too (the last one of a path).
    """

    keep_truncated = True

    def __init__(
        self, spec: str, how: Workers, *, columns: Sequence[str] | None = None, answer_column: str | None = None,
        task: str = "",
    ) -> None:  # fmt: skip
        file, _, function = spec.rpartition(":")
        self.name = spec
        setup = {
            "kind": "function", "path": str(Path(file).resolve()), "function": function, "task": task,
            "columns": None if columns is None else list(columns),
            "answer_column": None if answer_column == "answer" else (answer_column or "").rpartition(".")[2] or None,
        }  # fmt: skip
        super().__init__(setup, how, grace=_GRACE)
        try:
            facts = self.pool.check()
        except WorkerStartError as error:
            self.close()
            raise InputError(f"verifier {spec}: can't be loaded: {error}") from error
        self.form, self.whole = str(facts.get("form")), bool(facts.get("whole"))

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given; a group is judged in one call where the function takes groups."""
        calls = _groups(samples) if self.whole else [[i] for i in range(len(samples))]
        answers = self.ask([{"samples": [_plain(samples[i]) for i in call]} for call in calls])
        verdicts: dict[int, Verdict] = {}
        for call, answer in zip(calls, answers, strict=True):
            results = answer.get("results", [answer] * len(call))
            if not isinstance(results, list) or len(results) != len(call):
                results = [{}] * len(call)
            verdicts |= {
                i: read_answer(result if isinstance(result, dict) else {}, f"sample {i}", {})
                for i, result in zip(call, results, strict=True)
            }
        return [verdicts[i] for i in range(len(samples))]


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    """The places of each group's samples, groups in the order of their first."""
    found: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        found.setdefault(("alone", i) if sample.group is None else sample.group, []).append(i)
    return list(found.values())


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "completion": sample.completion,
        "answer": sample.answer,
        "prompt": sample.prompt,
        "truncated": sample.truncated,
        "extra": dict(sample.extra),
    }
