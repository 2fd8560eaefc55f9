"""What a model can do is tried on a few tokens instead of believed: once per model and attention implementation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: model -> attention implementation -> why not, or None
Known = weakref.WeakKeyDictionary[Any, dict[str, str | None]]


def attention_of(model: Any) -> str:
    """The name of the model's attention implementation, as transformers has it."""
    return getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) or "eager"


def reason_by_trial(known: Known, model: Any, trial: Callable[[], str | None]) -> str | None:
    """What `trial` said of the model: a reason, None, or the first line of the exception that it raised.

    It runs outside autocast, whose cache would keep weights cast without a graph.
    """
    answers, attention = known.setdefault(model, {}), attention_of(model)
    if attention not in answers:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            answers[attention] = _answer(trial)
    return answers[attention]


def _answer(trial: Callable[[], str | None]) -> str | None:
    try:
        return trial()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return (lines[0] if lines else type(error).__name__)[:160]


def relative_difference(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """Largest difference of two results, over the largest entry of `scale`; NaN if any of them is."""
    return float((a.double() - b.double()).abs().max() / scale.double().abs().max().clamp_min(1e-30))
