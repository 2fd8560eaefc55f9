"""What a run says of itself before it begins: parts that can't act, updates that are biased."""

from __future__ import annotations

from typing import Any

import kenpo


def idle_parts(algorithm: Any, updates: int, lag: int, foreign: bool) -> list[str]:
    """One line for each part that can't act in this run: why, and what would make it act."""
    found = kenpo.acts(algorithm, updates=updates, stale=lag > 0, foreign=foreign)
    return [f"{p.part} can't act: {p.why}; it would with {p.needed}" for p in found if not p.acts]


def notes(algorithm: Any, updates: int, lag: int = 0, foreign: bool = False, deterministic: bool = True) -> list[str]:
    """What a run says before its first step: idle parts, and updates without an importance ratio.

    ``updates`` are those per batch; ``foreign``: the sampler is not the trained module in its own precision.
    """
    bias, stale = kenpo.biased(algorithm, updates), kenpo.uncorrected(algorithm) if lag else None
    loose = ["kernels are not deterministic: resumed, this run does not repeat bit for bit (--deterministic on)"]
    return [
        *idle_parts(algorithm, updates, lag, foreign),
        *([f"biased updates: {bias}"] if bias else []),
        *([f"stale samples: {stale}"] if stale else []),
        *([] if deterministic else loose),
    ]
