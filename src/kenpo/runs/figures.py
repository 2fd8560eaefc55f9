"""The figures of a step: one JSON object per line of ``metrics.jsonl``, averages as sums and counts."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenpo.experience.source import Collected
    from kenpo.learner.figures import Report


def step_figures(step: int, collected: Collected, report: Report) -> dict[str, Any]:
    """What a step did: the source's figures, then the update's."""
    figures: dict[str, Any] = {"step": step, **collected.figures, "updates": report.updates, "lr": report.lr}
    filtered = max(0, collected.generated - (report.trained - report.foreign))
    figures["tokens"] = {"generated": collected.generated, "filtered": filtered, "trained": report.trained}
    sampler = collected.rollouts.logp_sampler
    if "entropy" not in report.sums and sampler is not None:
        mask = collected.rollouts.mask & ~collected.rollouts.elsewhere.unsqueeze(-1)
        figures["entropy_estimate"] = {"sum": -float(sampler[mask].double().sum()), "count": int(mask.sum())}
    figures |= {name: {"sum": total, "count": count} for name, (total, count) in sorted(report.sums.items())}
    figures |= dict(sorted(report.extremes.items()))
    figures["time"] = {**collected.seconds, **report.seconds}
    return figures


def average(figures: Mapping[str, Any], name: str) -> float | None:
    """A figure as one number; None if it is absent or an average over nothing."""
    value = figures.get(name)
    if isinstance(value, Mapping):
        return value["sum"] / value["count"] if value.get("count") else None
    return value


def scalars(figures: Mapping[str, Any]) -> dict[str, float]:
    """Every figure as one number, as loggers want them; ``time`` and ``tokens`` become ``time/…`` and ``tokens/…``."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if name == "step":
            continue
        if isinstance(value, Mapping) and "count" not in value:
            flat |= {f"{name}/{k}": float(v) for k, v in value.items()}
        else:
            number = average(figures, name)
            if number is not None:
                flat[name] = float(number)
    return flat


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
