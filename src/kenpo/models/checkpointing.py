"""Activation checkpointing: a layer's inner activations are computed again in the backward pass instead of kept.

transformers does it for layers in training mode only, while Kenpo runs models in eval mode, so that dropout is no part
of the policy. So the mode is switched for the layers themselves, not for what is inside them, and only while a forward
pass with gradient runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from kenpo.errors import InputError

_enabled: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def enable_checkpointing(model: Any) -> None:
    """Checkpoint every layer of the model in forward passes with gradient. InputError for a model that can't."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise InputError(
            f"--gradient-checkpointing: {type(model).__name__} has no layers that transformers can checkpoint; "
            "leave the option out and lower --microbatch-tokens instead"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _checkpoint  # type: ignore[assignment]
    _enabled[model] = layers


def checkpointing(model: Any) -> bool:
    """Whether `enable_checkpointing` was called for the model and gradients are on."""
    return torch.is_grad_enabled() and model in _enabled


@contextlib.contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Within it the forward pass keeps each layer's input only, if that was enabled for the model."""
    layers = _enabled.get(model, []) if torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _checkpoint(function: Any, *args: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False)
