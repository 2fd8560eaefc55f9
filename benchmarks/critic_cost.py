"""What a critic costs beside a group: memory and processor time of a step, for grpo, a head on the trunk, and a copy.

    python benchmarks/critic_cost.py [--quick] [--json]

A fresh model of 26 million parameters in float32, 32 samples of up to 16 tokens a step, AdamW. The reward, the share
of digits, differs from sample to sample: with equal rewards grpo would run no backward pass. Memory is the largest
resident size of the process; time is processor seconds of one thread a step, from a run of 5 steps less one of 1, so
that loading drops out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import measure  # noqa: E402

REWARD = "def digits(completion, answer):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
VARIANTS = {
    "grpo": ["--algorithm", "grpo", "--set", "regularizers=[]"],
    "ppo, trunk": ["--algorithm", "ppo", "--set", "advantage.kl=0.0"],
    "ppo, copy": ["--algorithm", "ppo", "--critic", "copy", "--set", "advantage.kl=0.0"],
}


def make(folder: Path, quick: bool) -> int:
    """Write a fresh model; returns its number of parameters."""
    from fresh_model import Architecture

    from kenpo.experience.addition import character_tokenizer

    tokenizer = character_tokenizer()
    hidden, layers = (64, 2) if quick else (512, 8)
    model = Architecture("qwen3", hidden=hidden, layers=layers, heads=8, context=64).build(tokenizer, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "reward.py").write_text(REWARD)
    return sum(p.numel() for p in model.parameters())


def run(model: Path, out: Path, steps: int, options: list[str]) -> tuple[int, float]:
    """(largest resident bytes, processor seconds) of one training run."""
    command = [
        sys.executable, "-m", "kenpo", "train", "--model", str(model), "--task", "addition", "--steps", str(steps),
        "--prompts", "8", "--group-size", "4", "--max-tokens", "16", "--eval-problems", "0", "--checkpoint-every", "0",
        "--threads", "1", "--quiet", "--out", str(out), "--verifier-workers", "1",
        "--verifier", f"{model.parent}/reward.py:digits", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return json.loads((out / "summary.json").read_text())["peak_rss_bytes"], used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="kenpo-critic-cost-") as name:
        folder = Path(name)
        parameters = make(folder / "model", a.quick)
        for number, (variant, options) in enumerate(VARIANTS.items()):
            _, short = run(folder / "model", folder / f"{number}-1", 1, options)
            peak, long = run(folder / "model", folder / f"{number}-5", 5, options)
            found[variant] = {"peak": peak, "seconds": (long - short) / 4}
    base = found["grpo"]
    for f in found.values():
        f |= {"more_bytes": f["peak"] - base["peak"], "time_over_grpo": f["seconds"] / base["seconds"]}
    if a.json:
        print(json.dumps({"parameters": parameters, "results": found, "versions": measure.versions()}))
        return
    rows = [
        [name, f"{f['peak'] / 2**20:,.0f} MiB", f"{f['more_bytes'] / 2**20:+,.0f} MiB", f"{f['seconds']:.2f} s",
         f"{f['time_over_grpo']:.2f}"]
        for name, f in found.items()
    ]  # fmt: skip
    print(f"{parameters:,} parameters, {4 * parameters / 2**20:,.0f} MiB of weights")
    print(measure.table(rows, ["run", "largest resident", "over grpo", "processor time a step", "over grpo"]))
    print("versions: " + ", ".join(f"{k} {v}" for k, v in measure.versions().items()))


if __name__ == "__main__":
    main()
