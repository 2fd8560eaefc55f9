"""Staleness and mismatch: which methods still learn when old weights, or another sampler, drew the samples.

    python benchmarks/staleness.py              # one seed; goes on with what its file lacks
    python benchmarks/staleness.py --seeds 3
    python benchmarks/staleness.py --quick

The bundled task under `--recipe several-updates` (eight updates a batch), 16 steps, in three situations:

- `fresh`: samples of the weights of the moment;
- `stale`: `--lag 4`, so that a batch is 32 updates old when it is taken up, and 39 at its last update;
- `foreign`: `--sampler-noise temperature=1.3`: what sampled is not the policy; its own log-probs are recorded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "effects"))
import runs

METHODS = ("grpo", "gspo", "off_policy_grpo", "tis", "icepop", "m2po", "minpro", "trm")
SITUATIONS = {"fresh": (), "stale": ("--lag", "4"), "foreign": ("--sampler-noise", "temperature=1.3")}
FIGURES = ("reward", "kl_sampler", "kept", "effective_sample_size", "clip_high", "clip_low")


def cells(seeds: int, quick: bool) -> list[runs.Cell]:
    """All runs, the first seed of everything first."""
    how = ("--steps", "16", "--eval-every", "4", "--eval-problems", "300", "--checkpoint-every", "0")
    if quick:
        how = ("--steps", "2", "--prompts", "4", "--eval-every", "0", "--eval-problems", "8", "--checkpoint-every", "0")
    return [
        runs.Cell(f"{name} {situation}", seed, ("--recipe", "several-updates", "--algorithm", name, *options, *how))
        for seed in range(seeds)
        for situation, options in SITUATIONS.items()
        for name in (METHODS[:2] if quick else METHODS)
    ]


def distance(found: dict[str, Any], name: str) -> str:
    """The divergence from what sampled and the share of tokens kept, over the last quarter of the steps."""
    rows = [r["figures"] for key, r in found.items() if key.rpartition("/")[0] == name]
    shown = []
    for figure, word in (("kl_sampler", "KL to the sampler"), ("kept", "kept")):
        values = [x for row in rows for x in row[figure][-4:] if x is not None]
        if values:
            shown.append(f"{word} {sum(values) / len(values):.3g}")
    return ", ".join(shown)


def main() -> None:
    """Measure, draw, print."""
    a = runs.arguments(__doc__ or "", seeds=1)
    found = runs.measured("staleness", cells(1 if a.quick else a.seeds, a.quick), a, FIGURES)
    if not a.quick:
        for situation in SITUATIONS:
            mine = {k: r for k, r in found.items() if f" {situation}/" in k}
            runs.draw(mine, runs.ROOT / f"docs/effects/staleness-{situation}.png", f"Samples: {situation}")
    runs.finish("staleness", found, a, runs.table(found, {n: distance(found, n) for n in runs.by_name(found)}))


if __name__ == "__main__":
    main()
