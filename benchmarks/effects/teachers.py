"""Teachers: what a stronger model, or the policy under a hint, adds to the same rollouts.

    python benchmarks/effects/teachers.py            # five seeds; goes on with what its file lacks
    python benchmarks/effects/teachers.py --quick

A student that solves about 0.29 of the bundled task, and a teacher that solves nearly all (the student itself after 30
steps of grpo). `opsa` reads neither a teacher nor a reward: what it gains can't be laid to a teacher. For `sdpo` and
`opsd` there is no teacher model: the student is first taught on 1,500 texts to read hints (half of them hinted and
right, half plain with 60 % of the carries dropped, so that its accuracy without a hint stays low), and then learns from
what it would have said, had it seen the right answer. `plain` is grpo from that same start.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import runs

STEPS, EVAL = 12, 300
TEXTS = 1500


def teacher(folder: Path, steps: int) -> str:
    """The checkpoint of a long grpo run."""
    out = folder / "teacher"
    if out.is_dir():
        return runs.last(out)
    runs.kenpo(["train", "--steps", str(steps), "--seed", "100", "--eval-problems", "0", "--threads", "1",
                "--checkpoint-every", "0", "--out", str(out), "--quiet"])  # fmt: skip
    return runs.last(out)


def reader(folder: Path, steps: int) -> str:
    """The student, taught to make use of a hint that stands before the problem."""
    from kenpo.experience.addition import demonstration, trace

    rows = []
    for i in range(TEXTS):
        prompt, response = demonstration(7, i)
        a, b = map(int, prompt[:-1].split("+"))
        right = trace(a, b)
        rows.append(
            {"prompt": f"{right};{prompt}", "response": right} if i % 2 else {"prompt": prompt, "response": response}
        )
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "reader"
    if out.is_dir():
        return runs.last(out)
    runs.kenpo(["train", "--algorithm", "sft", "--model", "bundled", "--task", str(file), "--steps", str(steps),
                "--prompts", "32", "--eval-problems", "0", "--lr", "3e-4", "--warmup", "10", "--threads", "1",
                "--checkpoint-every", "0", "--out", str(out), "--quiet"])  # fmt: skip
    return runs.last(out)


def cells(seeds: int, folder: Path, quick: bool) -> list[runs.Cell]:
    """Every run. The models are made first, once; their folders are not part of what is compared."""
    steps = 2 if quick else STEPS
    common = ("--steps", str(steps), "--eval-problems", str(20 if quick else EVAL), "--eval-every", "3",
              "--checkpoint-every", "0")  # fmt: skip
    strong, start = teacher(folder, 2 if quick else 30), reader(folder, 2 if quick else 150)
    recipe = ("--task", "addition", "--prompts", "16", "--group-size", "8", "--lr", "1e-4", "--warmup", "10",
              "--betas", "0.9", "0.99", "--max-tokens", "40")  # fmt: skip
    hinted = ("--model", start, *recipe, "--teacher", "hint", "--hint-column", "hint")
    named = {
        "grpo": ("--algorithm", "grpo"),
        "opsa": ("--algorithm", "opsa"),
        "opd": ("--algorithm", "opd", "--teacher", strong),
        "gkd": ("--algorithm", "gkd", "--teacher", strong),
        "teacher_mixed": ("--algorithm", "teacher_mixed", "--teacher", strong),
        "reader: grpo": ("--algorithm", "grpo", "--model", start, *recipe),
        "reader: sdpo": ("--algorithm", "sdpo", *hinted),
        "reader: opsd": ("--algorithm", "opsd", *hinted),
    }
    return [runs.Cell(n, seed, (*o, *common)) for n, o in named.items() for seed in range(seeds)]


def main() -> None:
    os.chdir(runs.ROOT)
    a = runs.arguments(__doc__ or "")
    home = runs.models("teachers", a.quick)
    found = runs.measured("teachers", cells(1 if a.quick else a.seeds, home, a.quick), a, ("reward", "entropy"))
    if not a.quick:
        runs.draw(found, runs.ROOT / "docs/effects/teachers.png", "Teachers on the bundled task")
    runs.finish("teachers", found, a, runs.table(found))


if __name__ == "__main__":
    main()
