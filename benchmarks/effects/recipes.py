"""Recipes: what each of `kenpo train --recipe NAME` shows, and the learning rates beside the one that it takes.

    python benchmarks/effects/recipes.py             # three seeds; goes on with what its file lacks
    python benchmarks/effects/recipes.py --quick

All train the bundled model on its task. Lines named `lr` were run to choose the learning rate of the recipe above them;
one seed each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import runs

SHOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "on-policy": {"grpo": ()},
    "several-updates": {"grpo": (), "gspo": ("--algorithm", "gspo")},
    "sparse-reward": {"grpo": (), "dapo": ("--algorithm", "dapo")},
    "long-answers": {
        "grpo": (),
        "untruncated": ("--with", "untruncated"),
        "soft_overlong": ("--with", "soft_overlong", "--set", "shaping.soft_overlong.limit=32",
                          "shaping.soft_overlong.buffer=4"),
    },
}  # fmt: skip
OTHER_RATES = {
    "several-updates": ("5e-6", "1e-4"), "sparse-reward": ("3e-5", "3e-4"), "long-answers": ("3e-5", "3e-4"),
}  # fmt: skip
FIGURES = ("reward", "truncated", "groups_kept", "length", "clip_high", "clip_low")


def cells(seeds: int, quick: bool) -> list[runs.Cell]:
    """All runs, the first seed of everything first."""
    how = ("--eval-every", "4", "--eval-problems", "300", "--checkpoint-every", "0")
    if quick:
        how = ("--steps", "1", "--prompts", "4", "--eval-every", "0", "--eval-problems", "8", "--checkpoint-every", "0")
    found = []
    for seed in range(seeds):
        for recipe, variants in SHOWN.items():
            for name, options in variants.items():
                rate = () if name != "grpo" or seed or quick else OTHER_RATES.get(recipe, ())
                found.append(runs.Cell(f"{recipe} {name}", seed, ("--recipe", recipe, *options, *how)))
                found += [
                    runs.Cell(f"{recipe} {name} lr {lr}", seed, ("--recipe", recipe, *options, "--lr", lr, *how))
                    for lr in rate
                ]
    return found


def main() -> None:
    """Measure, draw, print."""
    a = runs.arguments(__doc__ or "", seeds=3)
    found = runs.measured("recipes", cells(1 if a.quick else a.seeds, a.quick), a, FIGURES)
    if not a.quick:
        for recipe in SHOWN:
            mine = {k: r for k, r in found.items() if k.startswith(f"{recipe} ") and " lr " not in k}
            runs.draw(mine, runs.ROOT / "docs" / f"recipe-{recipe}.png", f"--recipe {recipe}")
    cut = {name: shares(found, name, "truncated") for name in runs.by_name(found)}
    runs.finish("recipes", found, a, runs.table(found, cut))


def shares(found: dict, name: str, figure: str) -> str:
    """Share of responses that were cut, over the first and the last quarter of the steps."""
    rows = [r["figures"][figure] for key, r in found.items() if key.rpartition("/")[0] == name]
    quarter = max(1, len(rows[0]) // 4)
    first, last = (sum(sum(row[part]) for row in rows) / len(rows) / quarter
                   for part in (slice(None, quarter), slice(-quarter, None)))  # fmt: skip
    return f"cut {first:.2f} -> {last:.2f}"


if __name__ == "__main__":
    main()
