"""Methods by their recipes: one run each of `kenpo train --recipe NAME` on the bundled task, side by side.

    python benchmarks/effects/methods.py             # one seed; goes on with what its file lacks
    python benchmarks/effects/methods.py --quick

It shows that each method learns and what it generates on the way. With one seed a difference of a few points says
nothing; what a method claims is looked for in experts.py, teachers.py, critic.py and preferences.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import runs

RECIPES = ("on-policy", "luffy", "sft_mixture", "grin", "repo", "oc_grpo", "graft", "sdpo", "opsd", "spo", "riskpo",
           "gapo", "mad_rl", "ttrl")  # fmt: skip
FIGURES = ("reward", "entropy")


def cells(seeds: int, quick: bool) -> list[runs.Cell]:
    """All runs, the first seed of everything first."""
    how = ("--eval-every", "3", "--eval-problems", "300", "--checkpoint-every", "0")
    if quick:
        how = ("--steps", "1", "--eval-every", "0", "--eval-problems", "8", "--checkpoint-every", "0")
    return [runs.Cell(name, seed, ("--recipe", name, *how)) for seed in range(seeds) for name in RECIPES]


def main() -> None:
    """Measure, draw, print."""
    a = runs.arguments(__doc__ or "", seeds=1)
    found = runs.measured("methods", cells(1 if a.quick else a.seeds, a.quick), a, FIGURES)
    if not a.quick:
        runs.draw(found, runs.ROOT / "docs/effects/methods.png", "Methods on the bundled task, one seed each")
    runs.finish("methods", found, a, runs.table(found))


if __name__ == "__main__":
    main()
