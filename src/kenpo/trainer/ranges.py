"""What each option may be: numbers in range, known names, options that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenpo.errors import InputError, unknown_name

if TYPE_CHECKING:
    from kenpo.trainer.config import TrainConfig

OPTIMIZERS = ("adamw", "torchao_adamw_8bit", "torchao_adamw_4bit",
              "bnb_adamw_8bit", "bnb_paged_adamw", "bnb_paged_adamw_8bit")  # fmt: skip

_AT_LEAST = {"steps": 1, "prompts": 1, "group_size": 1, "minibatches": 1, "epochs": 1, "microbatch_tokens": 1,
             "max_refills": 0, "verifier_workers": 1, "verifier_memory": 0, "lora_rank": 0, "lora_alpha": 0,
             "sampling_tokens": 1, "max_tokens": 1, "top_k": 0, "lr": 0, "warmup": 0, "weight_decay": 0, "grad_clip": 0,
             "threads": 1, "eval_every": 0, "eval_problems": 0, "eval_batch": 1, "checkpoint_every": 0, "keep": 0,
             "log_samples": 0, "expert_rows": 1, "corpus_rows": 1, "critic_lr": 0, "critic_warmup": 0,
             "rephrase_buffer": 0, "guided_rows": 0, "lag": 0, "max_staleness": 0}  # fmt: skip


def check(config: TrainConfig) -> None:
    """InputError for a number out of range or options that exclude each other."""
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise InputError(f"{flag(name)}: {value} is below the least allowed, {least}")
    if not -(2**63) <= config.seed < 2**63:
        raise InputError(f"--seed: {config.seed} does not fit into 64 bits")
    if not config.temperature > 0:
        raise InputError(f"--temperature: {config.temperature} is not above 0; greedy decoding is for evaluation only")
    if not 0 < config.top_p <= 1:
        raise InputError(f"--top-p: {config.top_p} is not in (0, 1]")
    for name in ("dropped_carry", "flipped_pairs"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise InputError(f"{flag(name)}: {value} is not a share between 0 and 1")
    if not config.time_limit > 0:
        raise InputError(f"--time-limit: {config.time_limit} is not above 0")
    if config.betas is not None and not (len(config.betas) == 2 and all(0 <= b < 1 for b in config.betas)):
        raise InputError(f"--betas: two numbers in [0, 1) expected, got {config.betas}")
    for name, allowed in {
        "schedule": ("constant", "linear", "cosine"),
        "dtype": ("float32", "bfloat16", "float64"),
        "head_dtype": ("model", "float32"),
        "attention": ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"),
        "packing": ("auto", "on", "off"),
        "refill": ("next", "same"),
        "long_prompts": ("refuse", "skip"),
        "unusable_pairs": ("skip", "refuse"),
        "optimizer": OPTIMIZERS,
        "deterministic": ("on", "off"),
    }.items():
        if getattr(config, name) is not None and getattr(config, name) not in allowed:
            raise unknown_name(name, str(getattr(config, name)), allowed)

    if config.sampling_tokens is not None and config.engine != "hf":
        raise InputError(f"--sampling-tokens bounds the embedded engine, not {config.engine}; leave it out")
    if config.keep_best is not None and not config.eval_problems:
        raise InputError(f"--keep-best {config.keep_best}: nothing is measured with --eval-problems 0")
    if config.recipe is not None:
        raise InputError("recipe: an option of the command line; in Python: TrainConfig(**defaults.RECIPES[name])")
    if config.head_dtype == "float32" and config.dtype == "float64":
        raise InputError("--head-dtype float32: the model is float64 already; leave it out")
    if config.lora_alpha == 0:
        raise InputError("--lora-alpha 0: the adapter would change nothing and get no gradient; give a number above 0")
    if not config.lora_rank and (config.lora_alpha is not None or config.lora_targets):
        raise InputError("--lora-alpha and --lora-targets shape a new adapter: give its --lora-rank too")


def flag(name: str) -> str:
    """The option that sets a field."""
    return "--" + {"settings": "set", "stages": "with"}.get(name, name).replace("_", "-")
