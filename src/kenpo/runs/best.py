"""The best checkpoint so far by a held-out figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kenpo.errors import InputError
from kenpo.runs.figures import average

LOWER_IS_BETTER = ("loss", "length", "truncated", "no_verdict")  # of these the smallest, of all others the largest


def check_figure(figure: str, figures: Mapping[str, Any]) -> None:
    """InputError for a figure that the held-out evaluation does not make."""
    if figure not in figures:
        listed = ", ".join(n for n in figures if n.startswith("eval/")) or "none"
        raise InputError(f"--keep-best {figure}: the held-out evaluation makes no such figure; it makes {listed}")


def better(best: Mapping[str, Any], figure: str, figures: Mapping[str, Any], step: int) -> dict[str, Any] | None:
    """{"figure", "value", "step"} if this step's figure beats the best so far, else None. The first of equals stays."""
    value = average(figures, figure)
    if value is None or value != value:
        return None
    low = figure.rpartition("/")[2] in LOWER_IS_BETTER
    if best.get("figure") == figure and not (value < best["value"] if low else value > best["value"]):
        return None
    return {"figure": figure, "value": value, "step": step}
