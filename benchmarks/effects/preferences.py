"""Preferences: what each pairwise loss makes of the same pairs, with a tenth and with three tenths of them flipped.

    python benchmarks/effects/preferences.py         # five seeds; goes on with what its file lacks
    python benchmarks/effects/preferences.py --quick

All learn from the bundled pairs: samples of the bundled model, told apart by the task's verifier. Held out are pairs
with the verifier's own labels, and problems that are answered greedily. Every run takes the same steps at the same
rate; a reward model's is ten times that, for its head starts at 0. `forgetting` is how far DPO goes when it is not
stopped: accuracy of its pairs and of its answers against the distance to where it started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import measure
import runs

FIGURES = ("eval/pair_accuracy", "eval/pair_margin", "eval/accuracy", "eval/kl", "eval/length")
SHARES = ("0.1", "0.3")


def cells(seeds: int, quick: bool) -> list[runs.Cell]:
    """Every run."""
    common = ("--steps", "2" if quick else "24", "--prompts", "16", "--eval-problems", "16" if quick else "128",
              "--eval-every", "12", "--checkpoint-every", "0", "--record-batches", "False")  # fmt: skip
    named = {
        **{f"{n}, {s} flipped": (n, "1e-5", s) for n in ("dpo", "simpo") for s in SHARES},
        "ipo, 0.1 flipped": ("ipo", "1e-5", "0.1"),
        "reward_model, 0.1 flipped": ("reward_model", "1e-4", "0.1"),
    }
    made = [
        runs.Cell(name, seed, ("--algorithm", n, "--lr", rate, "--flipped-pairs", share, *common))
        for seed in range(seeds)
        for name, (n, rate, share) in named.items()
    ]
    far = ("--algorithm", "dpo", "--lr", "3e-5", "--flipped-pairs", "0.1", "--steps", "2" if quick else "72",
           "--prompts", "32", "--eval-problems", "16" if quick else "128", "--eval-every", "6",
           "--checkpoint-every", "0", "--record-batches", "False")  # fmt: skip
    return [*made, runs.Cell("forgetting", 0, far)]


def at_the_end(found: dict[str, Any], name: str, figure: str) -> list[float]:
    """The last value of a figure in each run of that name."""
    rows = [r["figures"][figure] for key, r in found.items() if key.rpartition("/")[0] == name]
    return [[v for v in row if v is not None][-1] for row in rows if any(v is not None for v in row)]


def table(found: dict[str, Any]) -> str:
    """Accuracy of pairs before and after, margin, greedy accuracy and distance after; means and 95 % intervals."""
    lines = []
    for name, after in runs.by_name(found).items():
        if name == "forgetting":
            continue
        ends = {f: at_the_end(found, name, f) for f in FIGURES}
        lines.append([
            name, runs.shown(runs.by_name(found, "before")[name]), runs.shown(after),
            runs.shown(ends["eval/pair_margin"]),
            *(runs.shown(ends[f]) if ends[f] else "–" for f in ("eval/accuracy", "eval/kl", "eval/length")),
        ])  # fmt: skip
    head = ["run", "pairs before", "pairs after", "margin", "accuracy", "distance", "length"]
    return measure.table(lines, head) + "\n\n" + forgetting(found)


def forgetting(found: dict[str, Any]) -> str:
    """How a long run goes: distance to the start, accuracy of pairs and of answers at every measurement."""
    row = found["forgetting/0"]["figures"]
    points = list(zip(*(row[f] for f in ("eval/kl", "eval/pair_accuracy", "eval/accuracy")), strict=True))
    lines = [[f"{6 * (i + 1)}", *(f"{x:.3f}" for x in p)] for i, p in enumerate(p for p in points if p[0] is not None)]
    return measure.table(lines, ["step", "distance", "pairs", "accuracy"])


def main() -> None:
    os.chdir(runs.ROOT)
    a = runs.arguments(__doc__ or "")
    found = runs.measured("preferences", cells(1 if a.quick else a.seeds, a.quick), a, FIGURES)
    runs.finish("preferences", found, a, table(found))


if __name__ == "__main__":
    main()
