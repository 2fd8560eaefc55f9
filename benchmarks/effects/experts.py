"""Experts: what a worked solution adds where the policy never succeeds by itself, at equal generated tokens.

    python benchmarks/effects/experts.py             # three seeds; goes on with what its file lacks
    python benchmarks/effects/experts.py --quick

The start is the bundled model after 150 supervised steps on texts without a single carry, so that it fails on every sum
that has one; two thirds of these texts have a worked solution before the problem and are answered right, so that it can
restate what it is shown. Problems, and the held-out ones, are sums with a carry. `own style`: the expert writes the
policy's own procedure, with carries. `foreign style`: it writes the sum at once and the problem after it
(``=1258;864+394#1258``), which shows no way of finding it. A restated answer costs two further requests: `repo` takes
12 steps where the others take 15. The KL to the start is measured on the trained rows; but for `grin`, whose KL of
weight 5 is its own, the loss holds 1e-6 of it, so that it is measured and does nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import runs

STEPS, RESTATED_STEPS, EVAL = 15, 12, 200
TEXTS, PROBLEMS = 2400, 800
BETA = 1e-6
BETAS = {"grin": 5.0}


def foreign(a: int, b: int) -> str:
    """The sum at once, then the problem once more."""
    return f"={a + b};{a}+{b}#{a + b}"


def carries(a: int, b: int) -> bool:
    """Whether the written sum has a carry that an answer without carries gets wrong."""
    return any(a // p % 10 + b // p % 10 > 9 for p in (1, 10))


def write(path: Path, rows: list[dict[str, object]]) -> str:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def operands(seed: int, number: int, only: bool) -> list[tuple[int, int]]:
    """Operands from the training side; `only`: of sums with a carry."""
    from kenpo.experience.addition import AdditionTask

    task, found, index = AdditionTask(seed), [], 0
    while len(found) < number:
        a, b = divmod(task.train(index).id, 1000)
        index += 1
        if carries(a, b) or not only:
            found.append((a, b))
    return found


def start(folder: Path, steps: int) -> str:
    """The model that never carries unless it is shown how."""
    from kenpo.experience.addition import trace

    rows: list[dict[str, object]] = []
    for i, (a, b) in enumerate(operands(70, TEXTS, False)):
        shown = ("", trace(a, b) + ";", foreign(a, b) + ";")[i % 3]
        rows.append({"prompt": f"{shown}{a}+{b}=", "response": trace(a, b, carry=bool(shown))})
    out = folder / "start"
    if not out.is_dir():
        runs.kenpo(["train", "--algorithm", "sft", "--model", "bundled", "--task", write(folder / "texts.jsonl", rows),
                    "--steps", str(steps), "--prompts", "32", "--eval-problems", "0", "--lr", "3e-4", "--warmup", "10",
                    "--threads", "1", "--checkpoint-every", "0", "--out", str(out), "--quiet"])  # fmt: skip
    return runs.last(out)


def data(folder: Path) -> tuple[str, str, str, str]:
    """Files of problems, held-out problems, traces in the policy's style and in a foreign one."""
    from kenpo.experience.addition import trace

    pairs = list(dict.fromkeys(operands(71, PROBLEMS + EVAL, True)))
    train, held = pairs[:-EVAL], pairs[-EVAL:]

    def problems(name: str, some: list[tuple[int, int]]) -> str:
        return write(folder / name, [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in some])

    def traces(name: str, how: object) -> str:
        return write(folder / name, [{"prompt": f"{a}+{b}=", "trace": how(a, b)} for a, b in train])  # type: ignore[operator]

    return (problems("problems.jsonl", train), problems("heldout.jsonl", held),
            traces("own.jsonl", trace), traces("foreign.jsonl", foreign))  # fmt: skip


def cells(seeds: int, folder: Path, quick: bool) -> list[runs.Cell]:
    """Every run."""
    task, held, own, other = data(folder)
    common = ("--model", start(folder, 2 if quick else 150), "--task", task, "--eval-file", held, "--verifier",
              "numeric", "--prompts", "16", "--group-size", "8", "--lr", "1e-4", "--warmup", "5", "--betas", "0.9",
              "0.99", "--max-tokens", "40", "--eval-problems", str(20 if quick else EVAL), "--eval-every", "3",
              "--checkpoint-every", "0")  # fmt: skip
    named = {"grpo": ("grpo", "")} | {
        f"{name}, {style} style": (name, file)
        for style, file, names in (
            ("own", own, ("luffy", "grin", "sft_mixture", "repo")), ("foreign", other, ("luffy", "repo")),
        )
        for name in names
    }  # fmt: skip
    made = []
    for title, (name, file) in named.items():
        steps = 2 if quick else RESTATED_STEPS if name == "repo" else STEPS
        options = ["--algorithm", name, *common, "--steps", str(steps), *(["--expert", file] if file else [])]
        if name in ("luffy", "sft_mixture"):
            options += ["--with", "kl_to_reference"]
        if name not in BETAS:
            options += ["--set", f"regularizers.kl_to_reference.beta={BETA}"]
        if name == "repo":
            options += ["--rephrase-explain", "{trace};{prompt}", "--rephrase-answer", "{explanation};{prompt}"]
        made += [runs.Cell(title, seed, tuple(options)) for seed in range(seeds)]
    return made


def distances(found: dict[str, object]) -> dict[str, str]:
    """Entropy and KL to the start in the last step, averaged over seeds, and the restated rows per step."""
    shown = {}
    for name, figures in runs.by_name(found, "figures").items():
        beta = BETAS.get(name.partition(",")[0], BETA)

        def average(figure: str, figures: list = figures) -> float:  # type: ignore[type-arg]
            values = [f[figure][-1] for f in figures if f[figure][-1] is not None]
            return sum(values) / len(values) if values else float("nan")

        rows = [x or 0.0 for f in figures for x in f["rephrased/rows"]]  # type: ignore[index]
        shown[name] = (
            f"entropy {average('entropy'):.3f}, KL {average('kl_to_reference') / beta:.4f}, "
            f"restated answers accepted {sum(rows) / max(1, len(rows)):.0%}"
        )
    return shown


def main() -> None:
    os.chdir(runs.ROOT)
    a = runs.arguments(__doc__ or "", seeds=3)
    home = runs.models("experts", a.quick)
    figures = ("reward", "entropy", "kl_to_reference", "expert/reward", "rephrased/rows", "rephrased/reward")
    found = runs.measured("experts", cells(1 if a.quick else a.seeds, home, a.quick), a, figures)
    if not a.quick:
        (runs.ROOT / "docs/effects").mkdir(exist_ok=True)
        runs.draw(found, runs.ROOT / "docs/effects/experts.png", "Sums that the start never solves")
    runs.finish("experts", found, a, runs.table(found, distances(found)))


if __name__ == "__main__":
    main()
