"""TRL's side of versus_trl_dpo.py, in TRL's environment: DPOTrainer with reference log-probs computed beforehand, one
step whenever a line arrives.

    python trl_dpo_side.py SETUP.json

Every step's seconds and loss go to standard output as ``@@ JSON``; the last such line holds peak memory and versions.
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


def main() -> None:
    """Train as the setup says."""
    setup = json.loads(Path(sys.argv[1]).read_text())
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    if setup["threads"]:
        torch.set_num_threads(setup["threads"])

    class Gate(TrainerCallback):
        """Waits for the parent before a step; reports it once it has been logged."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            say("ready")
            sys.stdin.readline()
            gc.collect()
            self.began = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                say({"seconds": time.perf_counter() - self.began, "loss": float(logs["loss"])})

    class InOrder(DPOTrainer):
        """Takes the pairs in the order in which they stand."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    began = time.perf_counter()
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(setup["model"]),
        train_dataset=Dataset.from_list(setup["pairs"]),
        callbacks=[Gate()],
        args=DPOConfig(
            output_dir=setup["out"], per_device_train_batch_size=setup["rows"] or setup["prompts"],
            gradient_accumulation_steps=setup["prompts"] // (setup["rows"] or setup["prompts"]),
            max_steps=setup["steps"], learning_rate=setup["lr"], lr_scheduler_type="constant", warmup_steps=0,
            adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.0, max_grad_norm=1.0, beta=0.1, loss_type=["sigmoid"],
            precompute_ref_log_probs=True, max_length=None, bf16=False, gradient_checkpointing=False, use_cpu=True,
            seed=0, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        ),
    )  # fmt: skip
    beforehand = time.perf_counter() - began
    trainer.train()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    say({
        "peak_bytes": int(line.split()[1]) * 1024, "beforehand": beforehand,
        "versions": {n: version(n) for n in ("trl", "torch", "transformers", "accelerate")},
    })  # fmt: skip


if __name__ == "__main__":
    main()
