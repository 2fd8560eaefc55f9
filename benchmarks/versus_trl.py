"""The whole training step against TRL's GRPOTrainer: same model, prompts, group size, lengths, optimizer and loss.

    python benchmarks/versus_trl.py                     # both settings, five rounds; about ten minutes on 2 cores
    python benchmarks/versus_trl.py --only bundled      # or: long_prompt
    python benchmarks/versus_trl.py --quick             # two rounds of small batches, to see that it runs
    python benchmarks/versus_trl.py --accuracy          # also trains the bundled task to its end, 3 seeds a side

``bundled``: the bundled model on its task, the recipe of `kenpo train` (16 prompts times 8 samples, up to 40 tokens).
``long_prompt``: a Qwen3-style model of 2.9 million parameters (hidden 256, 4 layers, vocabulary 64), prompts of 512
tokens, responses of 64 tokens (its end of sequence is never sampled), groups of 8.

Both sides run in processes of their own and take turns, one step each; a step is everything between two batches:
sampling, rewards, forward, backward, optimizer, logs. Beside our parts stands their floor: the products of the weights,
2 operations a weight and token in sampling and 6 in the update, prompts counted once. TRL is installed into
``.peers/trl``. Memory is a process's whole peak. TRL may cut its batch as well: ``--trl-rows`` rows per forward pass
(the default here is the whole batch for the bundled task and a group for long prompts).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

HERE = Path(__file__).resolve().parent
TRL = (["torch==2.13.0"], ["torch==2.13.0", "trl==1.16.*", "transformers==5.24.*"])
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
SIZES: dict[str, dict[str, Any]] = {
    "bundled": {"prompts": 16, "group_size": 8, "max_tokens": 40, "reward": "numeric", "rows": 0},
    "long_prompt": {"prompts": 4, "group_size": 8, "max_tokens": 64, "reward": "share", "rows": 8},
}


def prepare(name: str, a: argparse.Namespace, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Everything a side needs to know, and the files it reads."""
    setup = {
        **SIZES[name], "name": name, "seed": seed, "threads": a.threads, "steps": a.repeats + a.warmup, "warmup": 10,
        "lr": 1e-4, "betas": [0.9, 0.99], "gated": True, "save": None, "out": str(folder / "out"),
    }  # fmt: skip
    if a.quick:
        setup |= {"prompts": 2, "max_tokens": 16}
    for option in ("prompts", "group_size", "max_tokens"):
        if getattr(a, option, 0):
            setup[option] = getattr(a, option)
    if a.trl_rows:
        setup["rows"] = a.trl_rows
    count = setup["steps"] * setup["prompts"]
    if name == "bundled":
        from kenpo.experience.addition import AdditionTask
        from kenpo.models.loading import BUNDLED

        task = AdditionTask(seed)
        setup["model"] = str(BUNDLED)
        setup["problems"] = [
            {"prompt": p.prompt, "answer": p.answer} for p in (task.train(i) for i in range(count))
        ]  # fmt: skip
    else:
        setup["model"] = str(folder / "model")
        long_prompt_model(folder / "model")
        draw = random.Random(seed)
        length = getattr(a, "prompt_length", 0) or (64 if a.quick else 512)
        setup["problems"] = [
            {"prompt": "".join(draw.choices(LETTERS[:26], k=length)), "answer": 0} for _ in range(count)
        ]
    return setup


def long_prompt_model(folder: Path, vocabulary: int = 64) -> None:
    """A random Qwen3-style model over 64 characters; its tokenizer's end and padding lie outside what it samples, or
    inside with a `vocabulary` of 65."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    if folder.exists():
        return
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, eos_token_id=64, pad_token_id=None,
            bos_token_id=None, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    words = {c: i for i, c in enumerate([*LETTERS[:64], "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)


# -- our side ---------------------------------------------------------------------------------------------------------


def ours(path: str) -> None:
    """`kenpo.train`, one step whenever a line arrives."""
    setup = json.loads(Path(path).read_text())
    import kenpo
    from kenpo.runs.callbacks import Callback
    from kenpo.trainer.config import TrainConfig

    class Gate(Callback):
        def wait(self) -> None:
            if setup["gated"]:
                say("ready")
                sys.stdin.readline()
            gc.collect()
            self.began, self.cpu = time.perf_counter(), time.process_time()

        def on_start(self, *_: Any) -> None:
            self.wait()

        def on_step(self, step: int, figures: Any) -> None:
            seconds, cpu = time.perf_counter() - self.began, time.process_time() - self.cpu
            idle = figures["idle"]["sum"] / figures["idle"]["count"]
            tokens = figures["tokens"]["generated"]
            say({"seconds": seconds, "cpu": cpu, "parts": figures["time"], "tokens": tokens, "idle": idle})
            if step < setup["steps"]:
                self.wait()

    folder = Path(path).parent
    task, verifier = "addition", None
    if setup["name"] != "bundled":
        task = str(folder / "task.jsonl")
        Path(task).write_text("".join(json.dumps(p) + "\n" for p in setup["problems"]))
        (folder / "reward.py").write_text(
            "def share(completion, answer, **kw):\n"
            "    return sum('a' <= c < 'n' for c in completion) / max(1, len(completion))\n"
        )
        verifier = f"{folder / 'reward.py'}:share"
    config = TrainConfig(
        model="bundled" if setup["name"] == "bundled" else setup["model"], task=task, verifier=verifier,
        algorithm="grpo", settings={"regularizers": [], "surrogate.high": 0.28}, steps=setup["steps"],
        prompts=setup["prompts"], group_size=setup["group_size"], max_tokens=setup["max_tokens"], lr=setup["lr"],
        warmup=setup["warmup"], betas=tuple(setup["betas"]), seed=setup["seed"], threads=setup["threads"] or None,
        eval_problems=0, checkpoint_every=0, record_batches=False, quiet=True, device="cpu", out=setup["out"],
    )  # fmt: skip
    summary = kenpo.train(config, [Gate()])
    peak = measure.peak_bytes()
    say({"peak_bytes": peak, "versions": summary["versions"], **layers(setup["model"])})


def layers(folder: str) -> dict[str, int]:
    """The layers' weights, and the sizes of their products."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    return {"weights": weights, "inner": model.config.hidden_size, "outer": model.config.intermediate_size}


def say(what: Any) -> None:
    """One line for the parent process."""
    print("@@ " + json.dumps(what), flush=True)


# -- the comparison ---------------------------------------------------------------------------------------------------


class Side:
    """A side's process, stepped from here."""

    def __init__(self, command: list[str], setup: dict[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True)
        path = folder / "setup.json"
        path.write_text(json.dumps({**setup, "out": str(folder / "out")}))
        self.errors = folder / "stderr"
        self.process = subprocess.Popen(
            [*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self.errors.open("w"),
        )  # fmt: skip

    def hear(self) -> Any:
        """The next thing it says. RuntimeError if it ended instead."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("@@ "):
                return json.loads(line[3:])
        raise RuntimeError(f"{self.process.args} ended:\n{self.errors.read_text()[-3000:]}")

    def step(self) -> dict[str, Any]:
        """One step; the process must have said that it is ready."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()


def compare(name: str, a: argparse.Namespace, folder: Path, python: Path) -> dict[str, Any]:
    """Seconds of each round, peak memory and versions of both sides."""
    setup = prepare(name, a, folder)
    commands = {
        "kenpo": [sys.executable, str(HERE / "versus_trl.py"), "--ours"],
        "trl": [str(python), str(HERE / "trl_side.py")],
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
    ours_last = last["kenpo"]
    rate = measure.product_rate(4096, ours_last["inner"], ours_last["outer"])  # alone on the machine
    samples = setup["prompts"] * setup["group_size"]
    seconds = {n: [r["seconds"] for r in found[a.warmup :]] for n, found in rounds.items()}
    counted = rounds["kenpo"][a.warmup :]
    parts = [r["parts"] for r in counted]
    prompts = sum(len(p["prompt"]) for p in setup["problems"]) / setup["steps"]  # one character is one token
    products = ours_last["weights"] * (statistics.median(r["tokens"] for r in counted) + prompts)
    return {
        "samples": samples,
        "seconds": seconds,
        "cpu_seconds": {n: [r["cpu"] for r in found[a.warmup :]] for n, found in rounds.items()},
        "samples_per_second": {n: samples / statistics.median(s) for n, s in seconds.items()},
        "ratio": measure.ratio(seconds["trl"], seconds["kenpo"]),
        "peak_bytes": {n: last[n]["peak_bytes"] for n in last},
        "versions": {n: last[n]["versions"] for n in last},
        "our_parts": {n: statistics.median(p[n] for p in parts) for n in parts[0]},
        "our_idle": [r["idle"] for r in counted],
        "floor": {n: k * products / rate for n, k in (("generate", 2), ("update", 6))},
    }


def accuracy(a: argparse.Namespace, folder: Path, python: Path) -> dict[str, list[float]]:
    """Held-out accuracy after the recipe of the bundled task, three seeds a side, both judged by `kenpo eval`."""
    found: dict[str, list[float]] = {"kenpo": [], "trl": []}
    steps = argparse.Namespace(**{**vars(a), "repeats": 12, "warmup": 0, "quick": False, "prompts": 0})
    for seed in range(3):
        setup = {**prepare("bundled", steps, folder, seed), "gated": False, "save": str(folder / f"trl-{seed}-model")}
        commands = {
            "kenpo": [sys.executable, str(HERE / "versus_trl.py"), "--ours"],
            "trl": [str(python), str(HERE / "trl_side.py")],
        }
        for name, command in commands.items():
            side = Side(command, setup, folder / f"{name}-{seed}")
            while "peak_bytes" not in side.hear():
                pass
            side.process.wait()
            model = setup["save"] if name == "trl" else f"{folder}/kenpo-{seed}/out/checkpoints/step_000012"
            evaluation = ["-m", "kenpo", "eval", model, "--task", "addition", "--max-tokens", "40", "--json"]
            found[name].append(measure.child(evaluation)["accuracy"])
            print(f"seed {seed} {name}: {found[name][-1]:.4f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and print."""
    if "--ours" in sys.argv:
        ours(sys.argv[-1])
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--accuracy", action="store_true", help="train the bundled task to its end, 3 seeds a side")
    p.add_argument("--only", choices=tuple(SIZES), help="one of the two settings")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--warmup", type=int, default=2, help="steps before the rounds that count")
    p.add_argument("--prompts", type=int, default=0, help="prompts per step, instead of 16 and 4")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--trl-rows", type=int, default=0, help="rows of TRL's forward pass")
    a = p.parse_args()
    if a.quick:
        a.repeats, a.warmup = 2, 1
    python = measure.environment("trl", *TRL)
    with tempfile.TemporaryDirectory() as scratch:
        names = [a.only] if a.only else list(SIZES)
        results = {n: compare(n, a, Path(scratch) / n, python) for n in names}
        trained = accuracy(a, Path(scratch) / "accuracy", python) if a.accuracy else None
    ratios = {}
    for name, r in results.items():
        ratios["samples_per_second" + ("_long_prompt" if name == "long_prompt" else "")] = r["ratio"]
    ratios["memory"] = max(r["peak_bytes"]["kenpo"] / r["peak_bytes"]["trl"] for r in results.values())
    if trained:
        ratios["accuracy_difference"] = statistics.mean(trained["kenpo"]) - statistics.mean(trained["trl"])
    if not a.json:
        show(results, trained)
    found = {
        **measure.versions(),
        **{f"{k} (TRL's)": v for k, v in next(iter(results.values()))["versions"]["trl"].items()},
    }
    measure.finish("versus_trl", ratios, found, a.json, results=results, accuracy=trained)


def show(results: dict[str, Any], trained: dict[str, list[float]] | None) -> None:
    """The tables."""
    for name, r in results.items():
        print(f"{name}: {r['samples']} samples a step, medians of {len(r['seconds']['kenpo'])} rounds")
        rows = [
            [
                n,
                f"{statistics.median(s):.3f}",
                f"{statistics.median(r['cpu_seconds'][n]):.3f}",
                f"{r['samples_per_second'][n]:.1f}",
                f"{r['peak_bytes'][n] / 2**20:.0f}",
            ]
            for n, s in r["seconds"].items()
        ]
        print(measure.table(rows, ["", "seconds a step", "of all cores", "samples/s", "peak MiB"]))
        print("ours: " + ", ".join(f"{k} {v:.3f} s" for k, v in r["our_parts"].items()))
        print(
            f"ours: {statistics.mean(r['our_idle']):.0%} of the rollouts had no gradient (their group's outcomes alike)"
        )
        print("products alone: " + ", ".join(f"{k} {v:.3f} s" for k, v in r["floor"].items()) + "\n")
    if trained:
        rows = [[n, *(f"{x:.4f}" for x in xs), f"{statistics.mean(xs):.4f}"] for n, xs in trained.items()]
        print(measure.table(rows, ["held-out accuracy", "seed 0", "seed 1", "seed 2", "mean"]))


if __name__ == "__main__":
    main()
