"""What a model can do is tried on a few tokens instead of believed: once, when its `Scorer` is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Largest relative difference that counts as agreement, by dtype: after one matrix product from the same states, and
#: after a whole forward pass (whose norms many families compute in float32).
TOLERANCE = {torch.float64: (1e-10, 1e-6), torch.float32: (1e-4, 1e-4)}
TOLERANCE_LOW = (2e-2, 5e-2)


def attention_of(model: Any) -> str:
    """The name of the model's attention implementation, as transformers has it."""
    return getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) or "eager"


def probe_ids(module: Any, rows: int, width: int) -> Tensor:
    """[rows, width] token ids that a trial runs: all different in a vocabulary that allows it."""
    weight = module.get_input_embeddings().weight
    ids = torch.arange(1, rows * width + 1, device=weight.device) * 7919 % int(weight.shape[0])
    return ids.reshape(rows, width)


def reason_by_trial(model: Any, trial: Callable[[], str | None]) -> str | None:
    """What `trial` says of the model: a reason, None, or the first line of the exception that it raises.

    It runs without gradient, in eval mode, outside autocast, whose cache would keep weights cast without a graph.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
            return trial()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return (lines[0] if lines else type(error).__name__)[:160]
    finally:
        model.train(training)


def disagreement(found: Tensor, right: Tensor, scale: Tensor, whole_pass: bool = True) -> str | None:
    """By how much of `scale` two results differ, or None: they agree up to rounding. NaN is no agreement."""
    worst = relative_difference(found, right, scale)
    limit = TOLERANCE.get(right.dtype, TOLERANCE_LOW)[whole_pass]
    return None if worst <= limit else f"{worst:.1g} of their size"


def relative_difference(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Largest difference of two results, over the largest entry of `scale`; NaN if any of them is."""
    return float((a.double() - b.double()).abs().max() / scale.double().abs().max().clamp_min(1e-30))
