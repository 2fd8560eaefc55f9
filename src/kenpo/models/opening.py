"""A run's model as its options say: loaded, with an adapter, on its device, by so many threads."""

from __future__ import annotations

import os
from typing import Any

import torch

from kenpo.errors import InputError
from kenpo.models.loading import load_model
from kenpo.models.lora import add_adapter, is_adapter
from kenpo.models.options import ModelOptions


def begins_anew(config: ModelOptions) -> bool:
    """Whether a run that goes on loads the model as it began: with an adapter, what it was trained to is taken up after
    the reference has been made of it."""
    return bool(config.lora_rank) or is_adapter(config.model)


def open_policy(config: ModelOptions, device: str, weights: str | None, seed: int) -> tuple[Any, Any]:
    """Model and tokenizer; `weights`: a checkpoint's folder. InputError for options on adapters that don't fit."""
    started = begins_anew(config)
    if config.save_adapter and not started:
        raise InputError(
            "--save-adapter: there is no adapter; give --lora-rank, or a --model that is an adapter's folder"
        )
    if config.lora_rank and is_adapter(config.model):
        raise InputError(f"--lora-rank: {config.model} is an adapter already and goes on being trained; leave it out")
    source = config.model if started else weights or config.model
    model, tokenizer = load_model(source, **how_loaded(config, device))
    if config.lora_rank:
        assert config.lora_alpha is not None
        add_adapter(model, config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets, seed=seed)
    return model, tokenizer


def how_loaded(config: ModelOptions, device: str) -> dict[str, Any]:
    """The arguments of `load_model` that the configuration settles."""
    return {
        "dtype": config.dtype, "device": device, "head_dtype": config.head_dtype, "attention": config.attention,
    }  # fmt: skip


def settle_torch(device: str, threads: int, deterministic: bool) -> None:
    """Fix the thread count, on a GPU ask for deterministic kernels."""
    torch.set_num_threads(threads)
    if device.startswith("cuda"):
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
