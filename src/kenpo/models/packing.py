"""Rows laid end to end in a single one: no token of padding runs, and no row sees another.

transformers tells the rows of a packed batch apart by positions that start again at 0: its variable-length attention
kernels take the borders from them, and the masks of its other attentions become block-diagonal. With the latter the
products between rows are computed and thrown away, so packing pays where there is such a kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError, unknown_name
from kenpo.models.head import accepted_arguments, module_inputs
from kenpo.models.trial import Known, attention_of, reason_by_trial, relative_difference

#: "auto" packs under a variable-length kernel, "on" under any attention, "off" never.
PACKING = ("auto", "on", "off")


def run(module: Any, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Output states [Σ lengths, H] of the rows' real tokens, and where each row starts. ``ids`` [R,W], left-aligned."""
    length = torch.tensor(lengths, device=ids.device)
    column = torch.arange(ids.shape[1], device=ids.device)
    real = column < length[:, None]
    positions = column.expand_as(ids)[real]
    out = module(input_ids=ids[real][None], position_ids=positions[None], use_cache=False)
    states = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return states[0], length.cumsum(0) - length


def why_padded(model: Any, module: Any, packing: str) -> str | None:
    """Why rows that share no prompt are padded; None: they are packed. InputError for "on" with a model that can't."""
    if packing not in PACKING:
        raise unknown_name("packing", packing, PACKING)
    if packing == "off":
        return "packing is off"
    if packing == "auto" and "flash" not in attention_of(model):
        return f"{attention_of(model)} attention would compute the products between packed rows too"
    reason = reason_against(model, module)
    if reason is not None and packing == "on":
        raise InputError(f"--packing on: {type(model).__name__} can't run packed rows ({reason}); use auto")
    return reason


_reasons: Known = weakref.WeakKeyDictionary()


def reason_against(model: Any, module: Any) -> str | None:
    """Why the model's rows can't be packed, or None. Proven once against a plain forward pass."""
    return reason_by_trial(_reasons, model, lambda: _fault(module))


def _fault(module: Any) -> str | None:
    missing = [n for n in ("position_ids", "use_cache") if n not in accepted_arguments(module)]
    return f"its forward takes no {missing[0]}" if missing else _probe(module)


@torch.no_grad()
def _probe(module: Any) -> str | None:
    """Rows of several lengths, of one token too, packed and each by itself."""
    weight = module.get_input_embeddings().weight
    ids = (torch.arange(1, 29, device=weight.device) * 7919 % int(weight.shape[0])).reshape(4, 7)
    lengths = [5, 1, 7, 3]
    states, starts = run(module, ids, lengths)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(states.dtype, 5e-2)
    for row, (start, n) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        out = module(**module_inputs(module, ids[row : row + 1, :n]))
        plain = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]
        worst = relative_difference(states[start : start + n], plain, plain)
        if not worst <= tolerance:
            return f"packed states differ from each row's own by {worst:.1g} of their size"
    return None
