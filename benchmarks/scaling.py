"""How time and memory grow: the log-prob path in positions and vocabulary, the training step in tokens and group size.

    python benchmarks/scaling.py                    # everything; about half an hour on 2 cores
    python benchmarks/scaling.py --only positions   # or: vocabulary, prompt, response, group
    python benchmarks/scaling.py --quick            # two small sizes each, to see that it runs
    python benchmarks/scaling.py --only group --keep runs/scaling.jsonl     # in parts; what is kept is not run again

``positions`` and ``vocabulary``: logprob.py at hidden size 512, ours and whole logits. ``prompt``, ``response``,
``group``: the whole step of versus_trl.py on its 2.9 M model, ours and TRL's, 2 prompts a step. Every series is fitted
by a power law (seconds ~ size^e; e 1 is linear) and a line (seconds = fixed + slope·size), and drawn into ``--plot``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import versus_trl

HERE = Path(__file__).resolve().parent
SERIES: dict[str, tuple[int, ...]] = {
    "positions": (512, 1024, 2048, 4096),
    "vocabulary": (8000, 16000, 32000, 64000),
    "prompt": (64, 128, 256, 512),
    "response": (16, 32, 64, 128),
    "group": (2, 4, 8, 16),
}
HEAD = ("positions", "vocabulary")  # the series of the log-prob path; the others are whole steps
SIDES = {"ours": "Kenpo", "plain": "whole logits", "trl": "TRL"}
TITLES = {
    "positions": "log-probs: positions",
    "vocabulary": "log-probs: vocabulary",
    "prompt": "step: tokens of a prompt",
    "response": "step: tokens of a response",
    "group": "step: samples of a prompt",
}
QUICK = {"positions": (64, 128), "vocabulary": (1000, 2000), "prompt": (32, 64), "response": (8, 16), "group": (2, 4)}


def head(series: str, size: int, a: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and bytes of the log-prob path, each side and round in a process of its own."""
    sizes = {"positions": 2048, "hidden": 512, "vocabulary": 32000, **({"hidden": 64} if a.quick else {})}
    if a.quick:
        sizes |= {"positions": 64, "vocabulary": 1000}
    sizes[series] = size
    arguments = [str(HERE / "logprob.py"), *(f"--{n}={v}" for n, v in sizes.items()), f"--threads={a.threads}"]
    rounds = [
        {s: measure.child([*arguments, "--measure", s]) for s in ("ours", "plain")} for _ in range(max(1, a.repeats))
    ]
    return {s: {n: statistics.median(r[s][n] for r in rounds) for n in ("seconds", "bytes")} for s in ("ours", "plain")}


def step(series: str, size: int, a: argparse.Namespace, python: Path) -> dict[str, dict[str, float]]:
    """Seconds of a whole step and the process's peak, both sides taking turns."""
    shape = {"prompt": 32 if a.quick else 256, "response": 8 if a.quick else 32, "group": 4 if a.quick else 8}
    shape[series] = size
    options = argparse.Namespace(
        repeats=a.repeats, warmup=1, threads=a.threads, quick=False, prompts=2, trl_rows=shape["group"],
        prompt_length=shape["prompt"], max_tokens=shape["response"], group_size=shape["group"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        r = versus_trl.compare("long_prompt", options, Path(scratch) / "run", python)
    return {
        {"kenpo": "ours"}.get(n, n): {"seconds": statistics.median(s), "bytes": r["peak_bytes"][n]}
        for n, s in r["seconds"].items()
    }


def fits(sizes: list[int], seconds: list[float]) -> dict[str, float]:
    """Exponent of a power law; fixed part and slope of a line; the line's share of variance explained."""
    exponent, _ = least_squares([math.log(x) for x in sizes], [math.log(y) for y in seconds])
    slope, fixed = least_squares(list(map(float, sizes)), seconds)
    mean = statistics.mean(seconds)
    spread = sum((y - mean) ** 2 for y in seconds)
    left = sum((y - fixed - slope * x) ** 2 for x, y in zip(sizes, seconds, strict=True))
    return {"exponent": exponent, "fixed": fixed, "slope": slope, "r2": 1 - left / spread if spread else 1.0}


def least_squares(x: list[float], y: list[float]) -> tuple[float, float]:
    """(slope, intercept)."""
    mx, my = statistics.mean(x), statistics.mean(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
    return slope, my - slope * mx


def draw(found: dict[str, dict[int, Any]], path: Path) -> None:
    """One panel a series, logarithmic on both axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(2, len(found), figsize=(3.2 * len(found), 5.6), squeeze=False, sharex="col")
    for column, (series, points) in enumerate(found.items()):
        for row, (what, unit, scale) in enumerate((("seconds", "seconds", 1), ("bytes", "MiB", 2**20))):
            panel = axes[row][column]
            for side in next(iter(points.values())):
                values = [p[side][what] / scale for p in points.values()]
                panel.plot(list(points), values, "o-", label=SIDES.get(side, side))
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_minor_formatter(NullFormatter())
            panel.set_xticks(list(points))
            panel.yaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.5)))
            panel.grid(alpha=0.3)
            if not column:
                panel.set_ylabel(unit)
        axes[0][column].set_title(TITLES[series], fontsize=10)
        axes[0][column].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def collect(a: argparse.Namespace, python: Path | None) -> dict[str, dict[int, Any]]:
    """All points, those that ``--keep`` holds taken from there."""
    kept = [json.loads(x) for x in a.keep.read_text().splitlines()] if a.keep and a.keep.exists() else []
    found: dict[str, dict[int, Any]] = {}
    for series in a.only or SERIES:
        points = found.setdefault(series, {})
        for size in (QUICK if a.quick else SERIES)[series]:
            wanted = {"series": series, "size": size, "quick": a.quick}
            old = next((k["point"] for k in kept if wanted.items() <= k.items()), None)
            if old is None:
                print(f"{series} {size}", file=sys.stderr, flush=True)
                if series in HEAD:
                    old = head(series, size, a)
                else:
                    assert python
                    old = step(series, size, a, python)
                if a.keep:
                    a.keep.parent.mkdir(parents=True, exist_ok=True)
                    with a.keep.open("a") as f:
                        f.write(json.dumps({**wanted, "point": old}) + "\n")
            points[size] = old
    return found


def main() -> None:
    """Measure, fit, draw and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--only", nargs="+", choices=tuple(SERIES))
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--keep", type=Path, help="append every point to this file and take from it what is there")
    p.add_argument("--plot", type=Path, default=Path("runs/scaling.png"))
    a = p.parse_args()
    if a.quick:
        a.repeats = 2
    steps = any(s not in HEAD for s in a.only or SERIES)
    found = collect(a, measure.environment("trl", *versus_trl.TRL) if steps else None)
    fitted = {
        series: {side: fits(list(points), [p[side]["seconds"] for p in points.values()]) for side in sides}
        for series, points in found.items()
        for sides in [list(next(iter(points.values())))]
    }
    draw(found, a.plot)
    if not a.json:
        for series, points in found.items():
            rows = [
                [f"{s} {size:,}", f"{x['seconds']:.3f}", f"{x['bytes'] / 2**20:.0f}"]
                for size, p in points.items() for s, x in p.items()
            ]  # fmt: skip
            print(measure.table(rows, [series, "seconds", "MiB"]))
            for side, f in fitted[series].items():
                print(f"{side}: seconds ~ {series}^{f['exponent']:.2f};  "
                      f"{f['fixed']:.3f} + {f['slope']:.3g}·{series} (R² {f['r2']:.3f})")  # fmt: skip
            print()
        print(f"drawn into {a.plot}")
    ratios = {f"exponent_{series}": f["ours"]["exponent"] for series, f in fitted.items()}
    measure.finish("scaling", ratios, measure.versions(), a.json, points=found, fits=fitted)


if __name__ == "__main__":
    main()
