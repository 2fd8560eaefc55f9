"""Verifiers whose samples are scored in worker processes, and how a worker's answer is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kenpo.errors import VerifierError
from kenpo.experience.pool import Hopeless, Pool, Workers, visible
from kenpo.experience.verdict import Base, Sample, Verdict

_PART = re.compile(r"\w[\w.\-]{0,63}")


class Remote(Base):
    """Samples are prepared here, judged in worker processes, and the plain data that comes back is read here."""

    def __init__(self, setup: Mapping[str, Any], how: Workers, *, grace: float = 0.0) -> None:
        self.pool = Pool(setup, how, grace=grace)

    def close(self) -> None:
        """End the worker processes; scoring again starts new ones."""
        self.pool.close()

    def processes(self) -> list[int]:
        """Process ids of the live workers."""
        return self.pool.processes()

    def prepare(self, sample: Sample) -> Verdict | dict[str, Any]:
        """What the worker is sent, or a verdict that needs no worker."""
        raise NotImplementedError

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given; a failure of one leaves the others' verdicts alone.

        VerifierError if no sample was ever judged and the first few fail in the same way.
        """
        prepared = [self._skip(sample) or self.prepare(sample) for sample in samples]
        sent = [(i, item) for i, item in enumerate(prepared) if not isinstance(item, Verdict)]
        answers = self.ask([item for _, item in sent])
        verdicts = {
            i: read_answer(answer, f"sample {i}", item) for (i, item), answer in zip(sent, answers, strict=True)
        }
        return [item if isinstance(item, Verdict) else verdicts[i] for i, item in enumerate(prepared)]

    def ask(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The workers' answers; VerifierError where the pool gives up."""
        answers = self.pool.run(calls, patient=False)
        if self.pool.hopeless:
            raise VerifierError(_hopeless(self.name, self.pool.hopeless, self.pool.how.time_limit))
        return answers


def _hopeless(name: str, found: Hopeless, limit: float) -> str:
    if found.status == "timeout":
        return (
            f"verifier {name} gave no verdict: each of its first {found.calls} calls took longer than {limit:g} s; "
            "find out what it waits for, or raise --time-limit if it is that slow"
        )
    return (
        f"verifier {name} gave no verdict: each of its first {found.calls} calls failed in the same way: "
        f"{visible(found.detail)}; "
        "mend the function; what it is called with is in docs/guides/own-verifier.md"
    )


def read_answer(answer: Mapping[str, Any], where: str, sent: Mapping[str, Any]) -> Verdict:
    """A worker's answer as a verdict: types, ranges and names are checked here, whatever the worker claims."""
    status: Any = answer.get("status")
    reward, found = answer.get("reward"), sent.get("found")
    detail = visible(str(answer.get("detail", "")))
    detail = f"{where}: {detail}" if detail and status in ("error", "timeout") else detail
    parts = answer.get("parts") or {}
    parts = {k: float(v) if isinstance(v, int | float) else math.nan for k, v in parts.items()}
    sound = all(_PART.fullmatch(k) and not math.isinf(v) for k, v in parts.items())
    if status == "ok" and isinstance(reward, int | float) and math.isfinite(reward) and sound:
        return Verdict(float(reward), "ok", found, detail, parts)
    if status not in ("error", "timeout", "abstain") or not sound:
        return Verdict(math.nan, "error", found, f"{where}: the worker sent no usable verdict")
    return Verdict(math.nan, status, found, detail, parts)
