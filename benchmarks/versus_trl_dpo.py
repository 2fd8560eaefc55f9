"""A step of DPO against TRL's DPOTrainer: same model, pairs in the same order, optimizer and loss, reference log-probs
computed beforehand on both sides.

    python benchmarks/versus_trl_dpo.py                     # both settings, seven rounds
    python benchmarks/versus_trl_dpo.py --only bundled      # or: long_prompt
    python benchmarks/versus_trl_dpo.py --quick             # two rounds of small batches, to see that it runs

``bundled``: the bundled model on its own pairs, 32 a step. ``long_prompt``: a Qwen3-style model of 2.9 million
parameters, prompts of 256 tokens, two responses of 64 tokens each, 8 pairs a step.

Both sides run in processes of their own and take turns, one step each; a step is everything between two batches. Their
losses are compared step by step: they do the same work. TRL is installed into ``.peers/trl`` unless ``--trl-python``
names an environment that has it. Memory is a process's whole peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
from versus_trl import LETTERS, TRL, Side, long_prompt_model, say

HERE = Path(__file__).resolve().parent
SIZES: dict[str, dict[str, int]] = {
    "bundled": {"prompts": 32, "rows": 0}, "long_prompt": {"prompts": 8, "rows": 0},
}  # fmt: skip


def prepare(name: str, a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything a side needs to know, and the files it reads. Pairs stand in the order in which our run takes them."""
    from kenpo.experience.pairs import Columns, bundled_pairs, file_pairs
    from kenpo.models.loading import BUNDLED

    folder.mkdir(parents=True)
    setup: dict[str, Any] = {
        **SIZES[name], "name": name, "threads": a.threads, "steps": a.repeats + a.warmup, "lr": 1e-5,
        "task": str(folder / "pairs.jsonl"), "model": str(BUNDLED),
    }  # fmt: skip
    if a.quick:
        setup["prompts"] = 2
    if a.trl_rows:
        setup["rows"] = a.trl_rows
    count = setup["steps"] * setup["prompts"]
    if name == "bundled":
        rows = [{"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected}
                for p in bundled_pairs(0, 0.1, 0).rows[:count]]  # fmt: skip
    else:
        setup["model"] = str(folder / "model")
        long_prompt_model(folder / "model", vocabulary=65)
        draw = random.Random(0)
        rows = [{n: "".join(draw.choices(LETTERS[:26], k=k)) for n, k in
                 (("prompt", a.prompt_length), ("chosen", 63), ("rejected", 63))} for _ in range(count)]  # fmt: skip
    Path(setup["task"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = file_pairs(setup["task"], Columns(), 0)
    return setup | {"pairs": [rows[stream.place(i)] for i in range(count)]}


def ours(path: str) -> None:
    """`kenpo.train`, one step whenever a line arrives."""
    setup = json.loads(Path(path).read_text())
    import kenpo
    from kenpo.runs.callbacks import Callback

    class Gate(Callback):
        def wait(self) -> None:
            say("ready")
            sys.stdin.readline()
            gc.collect()
            self.began = time.perf_counter()

        def on_start(self, *_: Any) -> None:
            self.first = time.perf_counter()

        def on_step(self, step: int, figures: Any) -> None:
            if step:
                say({"seconds": time.perf_counter() - self.began, "loss": figures["loss"]["sum"]})
            if step < setup["steps"]:
                self.wait()

    gate = Gate()
    source_begin = kenpo_begin(gate)
    config = kenpo.TrainConfig(
        model=setup["model"], task=setup["task"], algorithm="dpo", steps=setup["steps"], prompts=setup["prompts"],
        lr=setup["lr"], warmup=0, betas=(0.9, 0.99), eval_problems=0, checkpoint_every=0, record_batches=False,
        threads=setup["threads"] or None, quiet=True, device="cpu", out=setup["out"],
    )  # fmt: skip
    summary = kenpo.train(config, [gate])
    say({"peak_bytes": measure.peak_bytes(), "beforehand": source_begin[0], "versions": summary["versions"]})


def kenpo_begin(gate: Any) -> list[float]:
    """Lets the first step wait until the reference has been scored; the seconds that took come in the list."""
    from kenpo.experience.preferences import Pairs

    took: list[float] = []
    begin = Pairs.begin

    def timed(self: Any, start: Any) -> None:
        began = time.perf_counter()
        begin(self, start)
        took.append(time.perf_counter() - began)
        gate.wait()

    Pairs.begin = timed  # type: ignore[method-assign]
    return took


def compare(name: str, a: argparse.Namespace, folder: Path, python: Path) -> dict[str, Any]:
    """Seconds of each round, losses, peak memory and versions of both sides."""
    setup = prepare(name, a, folder)
    commands = {
        "kenpo": [sys.executable, str(HERE / "versus_trl_dpo.py"), "--ours"],
        "trl": [str(python), str(HERE / "trl_dpo_side.py")],
    }
    sides = {n: Side(c, setup, folder / n) for n, c in commands.items()}
    rounds: dict[str, list[dict[str, Any]]] = {n: [] for n in sides}
    for _ in range(setup["steps"]):
        for n, side in sides.items():
            assert side.hear() == "ready"
            rounds[n].append(side.step())
    last = {n: side.hear() for n, side in sides.items()}
    for side in sides.values():
        side.process.wait()
    seconds = {n: [r["seconds"] for r in found[a.warmup :]] for n, found in rounds.items()}
    losses = {n: [r["loss"] for r in found] for n, found in rounds.items()}
    return {
        "pairs": setup["prompts"], "seconds": seconds, "losses": losses,
        "loss_difference": max(abs(x - y) for x, y in zip(*losses.values(), strict=True)),
        "pairs_per_second": {n: setup["prompts"] / statistics.median(s) for n, s in seconds.items()},
        "ratio": measure.ratio(seconds["trl"], seconds["kenpo"]),
        "peak_bytes": {n: last[n]["peak_bytes"] for n in last},
        "versions": {n: last[n]["versions"] for n in last},
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    if "--ours" in sys.argv:
        ours(sys.argv[-1])
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--only", choices=tuple(SIZES), help="one of the two settings")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--warmup", type=int, default=2, help="steps before the rounds that count")
    p.add_argument("--prompt-length", type=int, default=256, help="of long_prompt, in tokens")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--trl-rows", type=int, default=0, help="pairs of TRL's forward pass (default: the whole batch)")
    p.add_argument("--trl-python", type=Path, help="Python of an environment that has TRL")
    a = p.parse_args()
    if a.quick:
        a.repeats, a.warmup = 2, 1
    python = a.trl_python or measure.environment("trl", *TRL)
    with tempfile.TemporaryDirectory() as scratch:
        results = {n: compare(n, a, Path(scratch) / n, python) for n in ([a.only] if a.only else SIZES)}
    ratios = {
        "pairs_per_second" + ("_long_prompt" if n == "long_prompt" else ""): r["ratio"] for n, r in results.items()
    }
    ratios["memory"] = max(r["peak_bytes"]["kenpo"] / r["peak_bytes"]["trl"] for r in results.values())
    if not a.json:
        for name, r in results.items():
            print(f"{name}: {r['pairs']} pairs a step, medians of {len(r['seconds']['kenpo'])} rounds; "
                  f"losses differ by at most {r['loss_difference']:.1e}")  # fmt: skip
            rows = [
                [n, f"{statistics.median(s):.3f}", f"{r['pairs_per_second'][n]:.1f}",
                 f"{r['peak_bytes'][n] / 2**20:.0f}"]
                for n, s in r["seconds"].items()
            ]  # fmt: skip
            print(measure.table(rows, ["", "seconds a step", "pairs/s", "peak MiB"]) + "\n")
    theirs = next(iter(results.values()))["versions"]["trl"]
    found = {**measure.versions(), **{f"{k} (TRL's)": v for k, v in theirs.items()}}
    measure.finish("versus_trl_dpo", ratios, found, a.json, results=results)


if __name__ == "__main__":
    main()
