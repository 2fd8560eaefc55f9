"""The learning curve of a run as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kenpo.runs.figures import average


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Sampled reward per step and held-out greedy accuracy, from the lines of ``metrics.jsonl``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), dpi=120)
    for name, label, style in (
        ("reward", "reward of the training samples", "-"),
        ("eval/accuracy", "held-out accuracy, greedy", "o-"),
        ("eval/loss", "held-out loss, nats per token", "o-"),
    ):
        points = [(m["step"], v) for m in metrics if (v := average(m, name)) is not None]
        if points:
            axis.plot([s for s, _ in points], [v for _, v in points], style, label=label)
    axis.set_xlabel("step")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
