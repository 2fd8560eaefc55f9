"""The figures of a step: one JSON object per line of ``metrics.jsonl``, averages as sums and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenpo.trainer.collect import Collected
    from kenpo.trainer.update import Report


def step_figures(step: int, collected: Collected, report: Report, correct_at: float) -> dict[str, Any]:
    """What a step did. Rewards and lengths are over every sample drawn with a verdict, also those filtered out."""
    records = collected.records
    judged = [r for r in records if r["reward"] is not None]
    right = [r for r in judged if r["reward"] >= correct_at]
    wrong = [r for r in judged if r["reward"] < correct_at]
    figures: dict[str, Any] = {
        "step": step,
        "reward": _mean(judged, lambda r: r["reward"]),
        "correct": {"sum": len(right), "count": len(judged)},
        "no_verdict": {"sum": len(records) - len(judged), "count": len(records)},
        "verifier_error": _mean(records, lambda r: r["status"] == "error"),
        "verifier_timeout": _mean(records, lambda r: r["status"] == "timeout"),
        "verifier_abstain": _mean(records, lambda r: r["status"] == "abstain"),
        "truncated": _mean(records, lambda r: r["truncated"]),
        "length": _mean(records, lambda r: r["tokens"]),
        "length_correct": _mean(right, lambda r: r["tokens"]),
        "length_wrong": _mean(wrong, lambda r: r["tokens"]),
        "groups_kept": {"sum": int(collected.rollouts.group.unique().numel()), "count": collected.groups_drawn},
        "rounds": collected.rounds,
        "updates": report.updates,
        "lr": report.lr,
        "tokens": {
            "generated": collected.generated,
            "filtered": collected.generated - report.trained,
            "trained": report.trained,
        },
    }
    for name in sorted({n for r in records for n in r["parts"]}):
        given = [r["parts"][name] for r in records if r["parts"].get(name) is not None]
        figures[f"part/{name}"] = {"sum": math.fsum(given), "count": len(given)}
    sampler = collected.rollouts.logp_sampler
    if "entropy" not in report.sums and sampler is not None:
        mask = collected.rollouts.mask
        figures["entropy_estimate"] = {"sum": -float(sampler[mask].double().sum()), "count": int(mask.sum())}
    figures |= {name: {"sum": total, "count": count} for name, (total, count) in sorted(report.sums.items())}
    figures |= dict(sorted(report.extremes.items()))
    figures["time"] = {**collected.seconds, **report.seconds}
    return figures


def _mean(records: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    return {"sum": math.fsum(value(r) for r in records), "count": len(records)}


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
