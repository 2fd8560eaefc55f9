"""TRL's side of versus_trl.py, in TRL's environment: GRPOTrainer on a model folder, one step whenever a line arrives.

    python trl_side.py SETUP.json

Every step's seconds go to standard output as ``@@ JSON``; the last such line holds peak memory and versions.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def say(what: Any) -> None:
    """One line for the parent process."""
    print("@@ " + json.dumps(what), flush=True)


def numeric(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 for the number behind '#', as the task's own verifier finds it."""
    found = (c.rpartition("#")[2].strip() for c in completions)
    return [float(f.lstrip("0") == str(a)) for f, a in zip(found, answer, strict=True)]


def share(completions: list[str], **_: Any) -> list[float]:
    """A graded reward of random text: the share of letters before 'n'."""
    return [sum("a" <= c < "n" for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Train as the setup says."""
    setup = json.loads(Path(sys.argv[1]).read_text())
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if setup["threads"]:
        torch.set_num_threads(setup["threads"])

    class Gate(TrainerCallback):
        """Waits for the parent before a step; reports it once the next one begins, so that its logs are timed too."""

        began: float | None = None

        def report(self) -> None:
            if self.began is not None:
                say({"seconds": time.perf_counter() - self.began, "cpu": time.process_time() - self.cpu})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.report()
            if setup["gated"]:
                say("ready")
                sys.stdin.readline()
            gc.collect()
            self.began, self.cpu = time.perf_counter(), time.process_time()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.report()

    samples = setup["prompts"] * setup["group_size"]
    model = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(setup["model"], padding_side="left"),
        reward_funcs={"numeric": numeric, "share": share}[setup["reward"]],
        train_dataset=Dataset.from_list(setup["problems"]),
        callbacks=[Gate()],
        args=GRPOConfig(
            output_dir=setup["out"],
            per_device_train_batch_size=setup["rows"] or samples,
            gradient_accumulation_steps=samples // (setup["rows"] or samples),
            num_generations=setup["group_size"],
            max_completion_length=setup["max_tokens"],
            max_steps=setup["steps"],
            learning_rate=setup["lr"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=setup["warmup"],
            adam_beta1=setup["betas"][0],
            adam_beta2=setup["betas"][1],
            weight_decay=0.0,
            max_grad_norm=1.0,
            temperature=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            loss_type="grpo",
            bf16=False,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_cpu=True,
            seed=setup["seed"],
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    if setup["save"]:
        trainer.model.save_pretrained(setup["save"])
        trainer.processing_class.save_pretrained(setup["save"])
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    say({
        "peak_bytes": int(line.split()[1]) * 1024,
        "versions": {n: version(n) for n in ("trl", "torch", "transformers", "accelerate")},
    })  # fmt: skip


if __name__ == "__main__":
    main()
