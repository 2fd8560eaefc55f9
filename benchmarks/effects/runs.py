"""What the effects share: training runs as cells of a table, each made once, kept in one JSON file, two at a time.

A cell is one `kenpo train` with a name and a seed. What is kept of it: its held-out accuracy against the tokens that it
has generated, chosen figures of every step, and its command. A benchmark that is stopped goes on with the cells that
its file lacks. Accuracy by generated tokens does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import measure  # noqa: E402

RESULTS = Path(__file__).with_name("results")
#: Half the width of a 95 % interval in standard errors (Student's t), by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


@dataclass(frozen=True)
class Cell:
    """One run: `options` are those of `kenpo train`, without --seed and --out."""

    name: str
    seed: int
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its place in the file."""
        return f"{self.name}/{self.seed}"


def arguments(about: str, seeds: int = 5) -> argparse.Namespace:
    """The command line of an effect."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps, to see that it runs; keeps nothing"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"seeds of each run ({seeds})")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (2)")
    parser.add_argument("--keep", type=Path, help="the file with what was measured (results/ beside this script)")
    return parser.parse_args()


def measured(name: str, cells: Sequence[Cell], a: argparse.Namespace, figures: Sequence[str] = ()) -> dict[str, Any]:
    """The results of all cells by their keys; those that the file lacks are run now."""
    with tempfile.TemporaryDirectory(prefix="kenpo-effect-") as folder:
        keep = a.keep or (Path(folder) if a.quick else RESULTS) / f"{name}.json"
        keep.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = json.loads(keep.read_text()) if keep.exists() else {}
        missing = [c for c in cells if found.get(c.key, {}).get("options") != list(c.options)]
        with ThreadPoolExecutor(a.jobs) as pool:
            for done, (cell, result) in enumerate(pool.map(lambda c: (c, run(c, Path(folder), figures)), missing), 1):
                found[cell.key] = result
                temporary = keep.with_suffix(".tmp")
                temporary.write_text(json.dumps(found, indent=1))
                os.replace(temporary, keep)
                print(f"{done}/{len(missing)} {cell.key}: {result['after']}", file=sys.stderr, flush=True)
        return {c.key: found[c.key] for c in cells}


def models(name: str, quick: bool) -> Path:
    """The folder, relative to the repository, for models that an effect makes first and keeps."""
    home = Path("runs/effects") / (f"{name}-quick" if quick else name)
    (ROOT / home).mkdir(parents=True, exist_ok=True)
    return home


def last(out: Path) -> str:
    """The last checkpoint of a run."""
    return str(sorted((out / "checkpoints").glob("step_*"))[-1])


def run(cell: Cell, folder: Path, figures: Sequence[str] = ()) -> dict[str, Any]:
    """Train one cell and read what it wrote. RuntimeError with its words if it fails."""
    out = folder / cell.key.replace("/", "-")
    kenpo(["train", *cell.options, "--seed", str(cell.seed), "--threads", "1", "--out", str(out), "--quiet"])
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve, generated = [], 0
    for line in lines:
        generated += line.get("tokens", {}).get("generated", 0)
        if "eval/accuracy" in line:
            curve.append([generated, mean(line["eval/accuracy"])])
    return {
        "options": list(cell.options), "before": summary["eval"]["before"], "after": summary["eval"]["after"],
        "generated": generated, "curve": curve,
        "figures": {n: [mean(line.get(n)) for line in lines if line["step"]] for n in figures},
    }  # fmt: skip


def kenpo(command: Sequence[str]) -> str:
    """Run the command line in a process of its own, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "kenpo", *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"kenpo {' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def mean(figure: Any) -> float | None:
    """A figure of ``metrics.jsonl`` as one number."""
    if isinstance(figure, Mapping):
        return figure["sum"] / figure["count"] if figure["count"] else None
    return figure


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval over seeds; NaN for a single one."""
    n = len(values)
    half = STUDENT[n] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return statistics.fmean(values), half


def by_name(found: Mapping[str, Any], what: str = "after") -> dict[str, list[float]]:
    """A number of each run, gathered over seeds, in the order of the cells."""
    rows: dict[str, list[float]] = {}
    for key, result in found.items():
        rows.setdefault(key.rpartition("/")[0], []).append(result[what])
    return rows


def shown(values: Sequence[float]) -> str:
    """``0.912 ± 0.034``, or the number alone."""
    middle, half = interval(values)
    return f"{middle:.3f}" if math.isnan(half) else f"{middle:.3f} ± {half:.3f}"


def table(found: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> str:
    """Accuracy before and after with 95 % intervals, and the tokens generated; `extra` adds a column by name."""
    rows = []
    for name, after in by_name(found).items():
        before, tokens = by_name(found, "before")[name], by_name(found, "generated")[name]
        row = [
            name,
            shown(before),
            shown(after),
            " ".join(f"{v:.3f}" for v in after),
            f"{statistics.fmean(tokens):,.0f}",
        ]
        rows.append([*row, *([] if extra is None else [extra.get(name, "")])])
    head = ["run", "before", "after", "each seed", "generated tokens"]
    return measure.table(rows, [*head, *([] if extra is None else [""])])


def draw(found: Mapping[str, Any], path: Path, title: str) -> None:
    """Held-out accuracy against generated tokens: the mean over seeds, and every seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), dpi=110)
    for number, name in enumerate(by_name(found)):
        curves = [r["curve"] for key, r in found.items() if key.rpartition("/")[0] == name]
        for curve in curves:
            axis.plot(*zip(*curve, strict=True), color=f"C{number % 10}", alpha=0.2, linewidth=0.8)
        points = list(zip(*curves, strict=False))
        across = [[statistics.fmean(x for x, _ in p), statistics.fmean(y for _, y in p)] for p in points]
        axis.plot(*zip(*across, strict=True), "o-", color=f"C{number % 10}", label=name, markersize=3)
    axis.set_xlabel("generated tokens")
    axis.set_ylabel("held-out accuracy, greedy")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def finish(name: str, found: Mapping[str, Any], a: argparse.Namespace, text: str) -> None:
    """Print the table, or everything as one object."""
    if a.json:
        print(json.dumps({"name": f"effects/{name}", "results": found, "versions": measure.versions()}))
        return
    print(text)
    print("\nversions: " + ", ".join(f"{k} {v}" for k, v in measure.versions().items()))
    print("command:  python " + " ".join(sys.argv))
