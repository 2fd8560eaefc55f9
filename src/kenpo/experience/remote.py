"""Verifiers whose samples are scored in worker processes, and how a worker's answer is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kenpo.experience.pool import Pool
from kenpo.experience.verdict import Base, Sample, Verdict


class Remote(Base):
    """Samples are prepared here, scored in worker processes, and the plain data that comes back is read here."""

    def __init__(self, setup: Mapping[str, Any], *, workers: int, time_limit: float) -> None:
        self.pool = Pool(setup, workers=workers, time_limit=time_limit)

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
        """One verdict per sample, in the order given; a failure of one leaves the others' verdicts alone."""
        prepared = [self._skip(sample) or self.prepare(sample) for sample in samples]
        sent = [(i, item) for i, item in enumerate(prepared) if not isinstance(item, Verdict)]
        answers = self.pool.run([item for _, item in sent])
        verdicts = {i: _read(answer, f"sample {i}", item) for (i, item), answer in zip(sent, answers, strict=True)}
        return [item if isinstance(item, Verdict) else verdicts[i] for i, item in enumerate(prepared)]


def _read(answer: Mapping[str, Any], where: str, sent: Mapping[str, Any]) -> Verdict:
    """A worker's answer as a verdict: types and ranges are checked here, whatever the worker claims."""
    status: Any = answer.get("status")
    reward, found = answer.get("reward"), sent.get("found")
    detail = str(answer.get("detail", ""))
    detail = f"{where}: {detail}" if detail and status in ("error", "timeout") else detail
    parts = answer.get("parts") or {}
    parts = {str(k): float(v) if isinstance(v, int | float) else math.nan for k, v in parts.items()}
    if status == "ok" and isinstance(reward, int | float) and math.isfinite(reward):
        return Verdict(float(reward), "ok", found, detail, parts)
    if status not in ("error", "timeout", "abstain"):
        status, detail = "error", f"{where}: the worker sent no usable verdict"
    return Verdict(math.nan, status, found, detail, parts)
