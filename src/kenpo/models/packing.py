"""Rows laid end to end in a single one: no token of padding runs, and no row sees another.

transformers tells the rows of a packed batch apart by positions that start again at 0: its variable-length attention
kernels take the borders from them, and the masks of its other attentions become block-diagonal. With the latter the
products between rows are computed and thrown away, so packing pays where there is such a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kenpo.errors import InputError, unknown_name
from kenpo.models.passes import accepted_arguments, call, to_device
from kenpo.models.trial import attention_of, disagreement, probe_ids, reason_by_trial

#: "auto" packs under a variable-length kernel, "on" under any attention, "off" never.
PACKING = ("auto", "on", "off")


def run(module: Any, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Output states [Σ lengths, H] of the rows' real tokens, and where each row starts. ``ids`` [R,W], left-aligned."""
    at = np.concatenate([np.arange(n) for n in lengths])  # positions count from 0 in every row
    row = np.repeat(np.arange(len(lengths)), lengths)
    places, positions = to_device(row * ids.shape[1] + at, ids.device), to_device(at, ids.device)
    states = call(module, ids.flatten()[places][None], positions=positions[None])[0]
    return states, to_device(np.cumsum([0, *lengths[:-1]]), ids.device)


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


def reason_against(model: Any, module: Any) -> str | None:
    """Why the model's rows can't be packed, or None. Tried against a plain forward pass."""
    return reason_by_trial(model, lambda: _fault(module))


def _fault(module: Any) -> str | None:
    """Rows of several lengths, of one token too, packed and each by itself."""
    missing = [n for n in ("position_ids", "use_cache") if n not in accepted_arguments(module)]
    if missing:
        return f"its forward takes no {missing[0]}"
    ids, lengths = probe_ids(module, 4, 7), [5, 1, 7, 3]
    states, starts = run(module, ids, lengths)
    for row, (start, n) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        plain = call(module, ids[row : row + 1, :n])[0]
        if (difference := disagreement(states[start : start + n], plain, plain)) is not None:
            return f"packed states differ from each row's own by {difference}"
    return None
