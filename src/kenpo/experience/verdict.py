"""What a verifier is handed and what it says: `Sample`, `Verdict`, the `Verifier` protocol and their base classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kenpo.experience.answers import accepted
from kenpo.experience.problem import Prompt

Status = Literal["ok", "error", "timeout", "abstain"]
NO_ANSWER, TRUNCATED = "no answer found", "truncated"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a verifier is handed; keyword-only, so that completion and answer can't be swapped.

    Samples of one `score` call with the same `group` answer one problem; None: a group of its own.
    """

    completion: str
    answer: Any
    prompt: Prompt = ""
    truncated: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None


@dataclass(frozen=True)
class Verdict:
    """A reward, or NaN for no verdict.

    `status` is "ok" for a number; "error", "timeout" and "abstain" come with NaN. `answer` is the extracted answer
    (None: none found, or the verifier names none), `detail` one line, `parts` named components of the reward.
    """

    reward: float
    status: Status
    answer: str | None = None
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scores samples in order; may be used from any thread and as a context manager."""

    name: str

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given; never raises for what one sample holds."""
        ...

    def close(self) -> None:
        """End worker processes, if any."""
        ...

    def __enter__(self) -> Verifier: ...

    def __exit__(self, *error: object) -> None: ...


def judged(right: bool, answer: str | None) -> Verdict:
    """1 or 0, with the answer found."""
    return Verdict(float(right), "ok", answer)


def abstain(detail: str, answer: str | None = None) -> Verdict:
    """No verdict: NaN, with the reason."""
    return Verdict(math.nan, "abstain", answer, detail)


class Base:
    """What all of ours share: samples that were cut off, and being a context manager."""

    name = ""
    keep_truncated = False

    def close(self) -> None:
        """End worker processes, if any."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _skip(self, sample: Sample) -> Verdict | None:
        """The verdict of a sample that is not looked at: one that was cut off."""
        if sample.truncated and not self.keep_truncated:
            return Verdict(0.0, "ok", None, TRUNCATED)
        return None


class InProcess(Base):
    """A verifier that judges its samples one by one in this process."""

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given."""
        return [self._skip(sample) or self.judge(sample) for sample in samples]

    def unreadable(self, answers: Sequence[Any]) -> dict[int, str]:
        """Why known answers can't be read, by their places in `answers`; the readable ones are left out."""
        reasons = ((i, self.refusal(each)) for i, answer in enumerate(answers) for each in accepted(answer))
        return {i: reason for i, reason in reasons if reason is not None}

    def refusal(self, answer: Any) -> str | None:
        """Why one known answer can't be read; None if it can."""
        raise NotImplementedError

    def judge(self, sample: Sample) -> Verdict:
        """The verdict of one sample that was not cut off."""
        raise NotImplementedError
