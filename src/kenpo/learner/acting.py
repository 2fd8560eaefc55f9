"""What a run says of itself before it begins: parts that can't act, updates that are biased."""

from __future__ import annotations

from typing import Any

import kenpo


def idle_parts(algorithm: Any, updates: int, stale: bool, foreign: bool) -> list[str]:
    """One line for each part that can't act in this run: why, and what would make it act."""
    found = kenpo.acts(algorithm, updates=updates, stale=stale, foreign=foreign)
    return [f"{p.part} can't act: {p.why}; it would with {p.needed}" for p in found if not p.acts]


def notes(
    algorithm: Any, updates: int, stale: bool = False, foreign: bool = False, deterministic: bool = True
) -> list[str]:
    """What a run says before its first step: idle parts, and updates without an importance ratio.

    ``updates`` are those per batch; ``stale``: older weights may have sampled a part of it; ``foreign``: the sampler is
    not the trained module in its own precision.
    """
    bias, old = kenpo.biased(algorithm, updates), kenpo.uncorrected(algorithm) if stale else None
    loose = ["kernels are not deterministic: resumed, this run does not repeat bit for bit (--deterministic on)"]
    return [
        *idle_parts(algorithm, updates, stale, foreign),
        *([f"biased updates: {bias}"] if bias else []),
        *([f"stale samples: {old}"] if old else []),
        *([] if deterministic else loose),
    ]
