"""Activation checkpointing: a layer's inner activations are computed again in the backward pass instead of kept.

transformers does it for layers in training mode only, while Kenpo runs models in eval mode, so that dropout is no part
of the policy. So the mode is switched for the layers themselves, not for what is inside them, and only while a forward
pass with gradient runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.models.passes import call
from kenpo.models.trial import probe_ids


def enable_checkpointing(model: Any) -> list[Any]:
    """The model's layers, ready for `checkpointed`. InputError for a model that can't, tried on a few tokens."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise InputError(
            f"--gradient-checkpointing: {type(model).__name__} has no layers that transformers can checkpoint; "
            "leave the option out and lower --microbatch-tokens instead"
        )
    plain = _probe(model, [])
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _checkpoint
        for name, value in vars(layer).items():  # dropout of the layer itself; in eval mode it does nothing anyway
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
    try:
        same = all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(plain, _probe(model, layers), strict=True)
        )
    except Exception as error:
        raise _refusal(model, str(error).splitlines()[0][:160]) from None
    if not same:
        raise _refusal(model, "its layers compute something else in training mode")
    return layers


def _refusal(model: Any, why: str) -> InputError:
    return InputError(f"--gradient-checkpointing: {type(model).__name__} can't be checkpointed ({why}); leave it out")


def _probe(model: Any, layers: list[Any]) -> tuple[Tensor, Tensor]:
    """Logits of a few tokens, and their sum's gradient in the first parameter that is trained."""
    first = next((p for p in model.parameters() if p.requires_grad), None)
    ids = probe_ids(model, 2, 4)
    model.eval()
    with torch.autocast(ids.device.type, enabled=False), checkpointed(layers):
        logits = call(model, ids).float()
    if first is None:
        return logits.detach(), logits.detach()
    (gradient,) = torch.autograd.grad(logits.square().mean(), first, allow_unused=True)
    return logits.detach(), torch.zeros_like(first) if gradient is None else gradient


@contextlib.contextmanager
def checkpointed(layers: list[Any]) -> Iterator[None]:
    """Within it a forward pass with gradient keeps each of these layers' input only."""
    layers = layers if torch.is_grad_enabled() else []
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
