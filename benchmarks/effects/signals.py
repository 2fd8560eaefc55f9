"""Where the advantage comes from: one planted situation for each signal that is no group's verdict.

    python benchmarks/effects/signals.py             # five seeds; goes on with what its file lacks
    python benchmarks/effects/signals.py --quick

Runs that stand beside one another generate about as many tokens.

- `uniform`: a start that solves most problems, so that nearly all of a group's samples are alike. `grpo` has 16 groups
  of 8, `spo` 128 prompts of one sample each, out of the same 256 problems.
- `varied`: "N=" asks for two digits with that sum; the start knows all ways of it and says one of them 7 times in 10.
  `grpo`, `gapo`, `mad_rl` (to equal shares) and `mad_rl-l2`, with how many different answers a group of 16 has.
- `tail`: held out are the sums that carry in all three places. `gspo`, `grpo`, `riskpo`.
- `confident`: the answer ends with a digit q, a confidence of q/9; the start says 9 mostly, right or wrong. `grpo` and
  `rlcr`, with the Brier score, the mean of (q/9 − right)².
- `unlabelled`: `ttrl` learns from its own majority, `grpo` from the answers: from a start whose majority is often
  wrong (the bundled model) and from one whose majority is mostly right.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import runs

STEPS, EVAL = 10, 150
RECIPE = ("--prompts", "16", "--group-size", "8", "--lr", "1e-4", "--warmup", "4", "--betas", "0.9", "0.99",
          "--max-tokens", "40")  # fmt: skip
JUDGE = '''"""A sum, and after it a digit that says how sure the policy is."""


def stated(completion, answer):
    found, _, digit = completion.rpartition("#")[2].partition(";")
    right = float(found == str(answer))
    q = int(digit) / 9 if len(digit) == 1 and digit.isdigit() else None
    return {"reward": right, "confidence": q, "brier": None if q is None else (q - right) ** 2}
'''


def write(path: Path, rows: list[dict[str, object]]) -> str:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def taught(folder: Path, name: str, rows: list[dict[str, object]], steps: int) -> str:
    """The bundled model after supervised steps on these rows."""
    out = folder / name
    if not out.is_dir():
        task = write(folder / f"{name}.jsonl", rows)
        runs.kenpo(["train", "--algorithm", "sft", "--model", "bundled", "--task", task, "--steps", str(steps),
                    "--prompts", "32", "--eval-problems", "0", "--lr", "3e-4", "--warmup", "10", "--threads", "1",
                    "--checkpoint-every", "0", "--out", str(out), "--quiet"])  # fmt: skip
    return runs.last(out)


def trained(folder: Path, name: str, steps: int) -> str:
    """The bundled model after steps of grpo."""
    out = folder / name
    if not out.is_dir():
        runs.kenpo(["train", "--steps", str(steps), "--seed", "100", "--eval-problems", "0", "--threads", "1",
                    "--checkpoint-every", "0", "--out", str(out), "--quiet"])  # fmt: skip
    return runs.last(out)


def sums(number: int, seed: int, *, carries: bool = False) -> list[dict[str, object]]:
    """Problems of the training side; `carries`: in all three places."""
    from kenpo.experience.addition import AdditionTask

    task, rows, index = AdditionTask(seed), [], 0
    while len(rows) < number:
        a, b = divmod(task.train(index).id, 1000)
        index += 1
        if not carries or all(x + y > 9 for x, y in zip(map(int, str(a)), map(int, str(b)), strict=True)):
            rows.append({"prompt": f"{a}+{b}=", "answer": str(a + b)})
    return rows


def pairs(total: int) -> list[str]:
    """All ways of writing `total` as two digits from 1 to 9."""
    return [f"{a}+{total - a}" for a in range(1, 10) if 1 <= total - a <= 9]


def uniform(folder: Path, quick: bool) -> dict[str, tuple[str, ...]]:
    pool = write(folder / "pool.jsonl", sums(256, 81))
    start = trained(folder, "strong", 2 if quick else 25)
    common = ("--model", start, *RECIPE, "--task", pool, "--verifier", "numeric", "--eval-file",
              write(folder / "pool-held.jsonl", sums(EVAL, 82)))  # fmt: skip
    alone = ("--prompts", "128", "--group-size", "1")
    return {"uniform: grpo": ("--algorithm", "grpo", *common), "uniform: spo": ("--algorithm", "spo", *common, *alone)}


def varied(folder: Path, quick: bool) -> dict[str, tuple[str, ...]]:
    draw = random.Random(83)
    texts: list[dict[str, object]] = []
    for _ in range(2400):
        ways = pairs(total := draw.randint(4, 16))
        way = ways[total % len(ways)] if draw.random() < 0.7 else draw.choice(ways)
        texts.append({"prompt": f"{total}=", "response": way})
    start = taught(folder, "ways", texts, 2 if quick else 100)
    rows: list[dict[str, object]] = [
        {"prompt": f"{n}=", "answer": pairs(n), "valid": pairs(n), "target": [1 / len(pairs(n))] * len(pairs(n))}
        for n in range(4, 17)
    ]
    file, held = write(folder / "ways-task.jsonl", rows[1:-1]), write(folder / "ways-held.jsonl", [rows[0], rows[-1]])
    common = ("--model", start, *RECIPE, "--task", file, "--eval-file", held, "--verifier", "exact", "--prompts", "11",
              "--group-size", "16", "--max-tokens", "8")  # fmt: skip
    return {f"varied: {n}": ("--algorithm", n, *common) for n in ("grpo", "gapo", "mad_rl", "mad_rl-l2")}


def tail(folder: Path, quick: bool) -> dict[str, tuple[str, ...]]:
    held = write(folder / "tail-held.jsonl", sums(EVAL, 84, carries=True))
    rows = write(folder / "tail.jsonl", sums(2000, 85))
    common = (*RECIPE, "--task", rows, "--eval-file", held, "--verifier", "numeric", "--prompts", "15")
    return {f"tail: {n}": ("--model", "bundled", "--algorithm", n, *common) for n in ("grpo", "gspo", "riskpo")}


def confident(folder: Path, quick: bool) -> dict[str, tuple[str, ...]]:
    from kenpo.experience.addition import demonstration

    draw = random.Random(86)
    texts: list[dict[str, object]] = []
    for i in range(2400):
        prompt, response = demonstration(86, i)
        texts.append({"prompt": prompt, "response": f"{response};{draw.choice('9999987654321')}"})
    start = taught(folder, "confident", texts, 2 if quick else 100)
    (folder / "judge.py").write_text(JUDGE)
    common = ("--model", start, *RECIPE, "--task", write(folder / "sums.jsonl", sums(2000, 87)), "--eval-file",
              write(folder / "sums-held.jsonl", sums(EVAL, 88)), "--verifier", f"{folder}/judge.py:stated",
              "--verifier-workers", "1")  # fmt: skip
    return {f"confident: {n}": ("--algorithm", n, *common) for n in ("grpo", "rlcr")}


def unlabelled(folder: Path, quick: bool) -> dict[str, tuple[str, ...]]:
    starts = {"weak": "bundled", "fair": trained(folder, "fair", 2 if quick else 6)}
    return {
        f"unlabelled: {n}, {how} start": ("--algorithm", n, "--model", start, "--task", "addition", *RECIPE)
        for how, start in starts.items() for n in ("grpo", "ttrl")
    }  # fmt: skip


def cells(seeds: int, folder: Path, quick: bool) -> list[runs.Cell]:
    """Every run, seed by seed. `--set regularizers=[]` where there is a KL: starts differ in how far they are."""
    steps = 2 if quick else STEPS
    common = ("--steps", str(steps), "--eval-problems", str(20 if quick else EVAL), "--eval-every", "5",
              "--checkpoint-every", "0", "--set", "regularizers=[]")  # fmt: skip
    named = {}
    for situation in (uniform, varied, confident, unlabelled, tail):
        named |= situation(folder, quick)
    return [runs.Cell(n, seed, (*o, *common)) for seed in range(seeds) for n, o in named.items()]


SHOWN = {
    "answers/distinct": "different answers", "answers/divergence": "divergence to uniform",
    "answers/variety": "1 − self-BLEU", "answers/valid": "valid answers",
    "part/brier": "Brier score", "part/confidence": "confidence",
    "advantage_abs": "mean |A|",
}  # fmt: skip


def figures(found: dict[str, object]) -> dict[str, str]:
    """First and last value of each situation's own figures, over seeds."""
    told = {}
    for name, all_ in runs.by_name(found, "figures").items():
        own = [n for n in SHOWN if n != "advantage_abs" or name.startswith("uniform")]
        parts = []
        for n in own:
            ends = [(f[n][0], f[n][-1]) for f in all_ if f[n][-1] is not None]  # type: ignore[index]
            if ends:
                parts.append(f"{SHOWN[n]} {runs.shown([a for a, _ in ends])} to {runs.shown([b for _, b in ends])}")
        told[name] = "; ".join(parts)
    return told


def main() -> None:
    os.chdir(runs.ROOT)
    a = runs.arguments(__doc__ or "", seeds=5)
    home = runs.models("signals", a.quick)
    found = runs.measured("signals", cells(1 if a.quick else a.seeds, home, a.quick), a, tuple(SHOWN))
    runs.finish("signals", found, a, runs.table(found, figures(found)))


if __name__ == "__main__":
    main()
