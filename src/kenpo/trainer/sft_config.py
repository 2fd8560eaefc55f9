"""The configuration of a supervised run: read by the command line, checked, resolved and recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kenpo.errors import InputError, unknown_name

DTYPES = ("float32", "bfloat16", "float64")
SCHEDULES = ("constant", "linear", "cosine")
FRESH_SIZES = ("hidden", "layers", "heads", "kv_heads", "ffn", "context")


@dataclass(frozen=True)
class SFTConfig:
    """Everything that defines a supervised run. None: filled by `resolve` and recorded."""

    out: str
    """Model folder to write; it must not exist."""
    model: str | None = None
    """Model to start from: a folder, a hub name, or "bundled". Give this or --fresh."""
    fresh: Literal["qwen3", "llama", "gpt2"] | None = None
    """Start from random weights of this architecture."""
    hidden: int | None = None
    """Width of a fresh model (192)."""
    layers: int | None = None
    """Layers of a fresh model (4)."""
    heads: int | None = None
    """Attention heads of a fresh model (4)."""
    kv_heads: int | None = None
    """Key-value heads of a fresh model (2 for qwen3, else as many as heads)."""
    ffn: int | None = None
    """Feed-forward width of a fresh model (about 8/3 of hidden; 4 times for gpt2)."""
    context: int | None = None
    """Longest sequence of a fresh model (256)."""
    tokenizer: str | None = None
    """Tokenizer folder of a fresh model; default: one token per character of the addition task."""

    data: str = "addition"
    """\"addition\", or a .jsonl, .json or .parquet file."""
    prompt_column: str | None = None
    """Column of a file that holds the prompt, a text or chat messages (prompt)."""
    response_column: str | None = None
    """Column of a file that holds the response (response)."""
    dropped_carry: float | None = None
    """Share of the addition demonstrations that ignore every carry (0.6)."""

    steps: int = 220
    batch: int = 64
    """Texts per optimizer step."""
    micro_batch: int | None = None
    """Texts in one forward and backward; changes memory and speed only. Default: the whole batch."""
    lr: float = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup: int = 20
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0: off."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16 computes under autocast; weights and optimizer stay float32, and so does the folder."""
    device: str = "cpu"
    seed: int = 0
    """Of the fresh weights and of the order of the texts."""
    threads: int | None = None
    """CPU threads, recorded because the order of additions depends on them; default: torch's."""

    eval_task: str | None = None
    """Task whose held-out greedy accuracy is measured before and after; default: addition on its own data."""
    eval_problems: int = 500
    """Held-out problems; 0: no measurement."""
    eval_tokens: int = 64
    """Longest response in the measurement."""
    quiet: bool = False
    """No progress."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        check(self)


_AT_LEAST = {"steps": 1, "batch": 1, "micro_batch": 1, "warmup": 0, "weight_decay": 0, "grad_clip": 0, "threads": 1,
             "eval_problems": 0, "eval_tokens": 1, "seed": 0}  # fmt: skip


def check(config: SFTConfig) -> None:
    """`InputError` for a number out of range, and for an option that would have no effect beside the others."""
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise InputError(f"{_flag(name)}: {value} is below the least allowed, {least}")
    if not 0 < config.lr < math.inf:
        raise InputError(f"--lr: {config.lr} is not a positive number")
    if not (len(config.betas) == 2 and all(0 <= b < 1 for b in config.betas)):
        raise InputError(f"--betas: two numbers in [0, 1) expected, got {config.betas}")
    if config.dropped_carry is not None and not 0 <= config.dropped_carry <= 1:
        raise InputError(f"--dropped-carry: {config.dropped_carry} is not a share between 0 and 1")
    for name, known in (("dtype", DTYPES), ("schedule", SCHEDULES)):
        if getattr(config, name) not in known:
            raise unknown_name(name, str(getattr(config, name)), known)
    if (config.model is None) == (config.fresh is None):
        raise InputError("give either --model FOLDER or --fresh ARCHITECTURE (qwen3, llama, gpt2)")
    if config.fresh is None:
        _refuse(config, (*FRESH_SIZES, "tokenizer"), "describes a fresh model; it has no effect with --model")
    if config.data == "addition":
        _refuse(config, ("prompt_column", "response_column"), "names a column of a file; it has no effect on addition")
    else:
        _refuse(config, ("dropped_carry",), "belongs to the addition demonstrations; it has no effect on a file")
        if config.fresh is not None and config.tokenizer is None:
            raise InputError(f"--tokenizer: a fresh model for {config.data} needs a tokenizer folder")


def _refuse(config: SFTConfig, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(config, name) is not None:
            raise InputError(f"{_flag(name)} {why}; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve(config: SFTConfig) -> SFTConfig:
    """The configuration with the Nones that have a value filled in, as it is recorded."""
    import torch

    filled: dict[str, Any] = {"micro_batch": config.micro_batch or config.batch}
    filled["threads"] = config.threads or torch.get_num_threads()
    if config.fresh is not None:
        from kenpo.trainer.fresh import Architecture

        sizes = {n: v for n in FRESH_SIZES if (v := getattr(config, n)) is not None}
        if config.fresh == "qwen3":
            sizes.setdefault("kv_heads", 2)
        shape = Architecture(config.fresh, **sizes)
        filled |= {n: getattr(shape, n) for n in FRESH_SIZES}
        filled |= {"ffn": shape.resolved_ffn(), "kv_heads": shape.kv_heads or shape.heads}
    if config.data == "addition":
        from kenpo.experience.addition import DROPPED_CARRY

        filled["dropped_carry"] = DROPPED_CARRY if config.dropped_carry is None else config.dropped_carry
        filled["eval_task"] = config.eval_task or "addition"
    else:
        filled["prompt_column"] = config.prompt_column or "prompt"
        filled["response_column"] = config.response_column or "response"
    return dataclasses.replace(config, **filled)
