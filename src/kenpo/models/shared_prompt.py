"""A prompt that several rows share runs once: its keys and values are handed to all of them, with exact gradients.

The tokens before the last prompt token run by themselves and fill transformers' cache; the rows go on from there, each
with a copy of the cache or, where that pays, reading the prompt's keys where they lie (`kenpo.models.shared_keys`). The
backward pass adds the rows' gradients up in the prompt's keys and values, so nothing is approximated. Prompts of
different lengths run side by side, padded at the left under a mask, positions counting real tokens (measured: as quick
as one prompt at a time, and far quicker where prompts are short).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kenpo.models.passes import accepted_arguments, cache_name, call, to_device
from kenpo.models.trial import disagreement, probe_ids, reason_by_trial

# When it pays, measured forward and backward on a CPU, hidden sizes 192 to 384, groups of 2 to 8, prompts of one length
# and of many: sharing that saves 9 % of a group's tokens took 0.93 to 0.95 of the time, 17 % 0.76 to 0.90, 24 % 0.69 to
# 0.91. In batches that save fewer tokens than the second number the rows' second pass costs what the first one spares.
LEAST_SHARE = 0.1
LEAST_TOKENS = 256


class Family(NamedTuple):
    """Rows that begin with the same ``prompt`` tokens, which run once."""

    rows: list[int]
    prompt: int


def saved(prompt: int, lengths: Sequence[int]) -> int:
    """Tokens that sharing saves for rows of these lengths that begin with the same `prompt` tokens; 0: no gain.

    The rule is `LEAST_SHARE` of the tokens of the rows.
    """
    spared = (len(lengths) - 1) * prompt
    return spared if spared >= LEAST_SHARE * sum(lengths) and spared > 0 else 0


def families(prefixes: Sequence[Hashable], prompts: Sequence[int], lengths: Sequence[int]) -> tuple[list[Family], int]:
    """Rows with equal `prefixes` for which sharing pays, and the tokens it saves in all."""
    same: dict[Hashable, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        same.setdefault(prefix, []).append(row)
    found, spared = [], 0
    for rows in same.values():
        gain = saved(prompts[rows[0]], [lengths[r] for r in rows]) if len(rows) > 1 else 0
        if gain:
            found.append(Family(rows, prompts[rows[0]]))
            spared += gain
    return found, spared


class Shared(NamedTuple):
    """Output states of rows that went on from shared prompts: ``states`` [R,S,H] start at position ``offset`` [R]."""

    states: Tensor
    rows: Tensor
    offset: Tensor


def run(module: Any, ids: Tensor, lengths: Sequence[int], found: Sequence[Family]) -> Shared:
    """Run the families' prompts once and their rows from there. ``ids`` [R,W] hold real tokens from the left."""
    rows = [r for family in found for r in family.rows]
    owner = np.repeat(np.arange(len(found)), [len(f.rows) for f in found])
    prompts = np.array([f.prompt for f in found])
    widest, size = int(prompts.max()), ids.shape[1]
    place = np.arange(widest) - (widest - prompts)[:, None]  # [F,P], negative on the padding
    first = np.array([f.rows[0] for f in found])[:, None] * size
    offset = prompts[owner]
    width = max(lengths[r] - f.prompt for f in found for r in f.rows)
    # What stands beyond a row's end is padding at the right, which nothing attends to and nothing reads.
    positions = offset[:, None] + np.arange(width)
    rest = np.array(rows)[:, None] * size + positions.clip(max=size - 1)
    positions = np.minimum(positions, np.array([lengths[r] for r in rows])[:, None] - 1)
    laid = (
        to_device(x, ids.device) for x in (place.clip(0), place >= 0, first + place.clip(0), rest, positions, owner)
    )
    at, real, head, rest_at, positions_at, whose = laid
    padded = bool((place < 0).any())
    cache, flat = _new_cache(module), ids.flatten()
    call(module, flat[head], positions=at, mask=real if padded else None, cache=cache)
    _hand_out(cache, whose, len(found))
    mask = torch.cat([real[whose], torch.ones_like(positions_at, dtype=torch.bool)], 1) if padded else None
    states = call(module, flat[rest_at], positions=positions_at, mask=mask, cache=cache)
    return Shared(states, to_device(np.array(rows), ids.device), to_device(offset, ids.device))


def _new_cache(module: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=module.config)


def _hand_out(cache: Any, owner: Tensor, prompts: int) -> None:
    """Every row its prompt's keys and values: a view where there is one prompt (they are copied once, on joining)."""
    for layer in cache.layers:
        if not layer.is_initialized:
            continue  # a layer that uses another's keys
        if prompts == 1:
            layer.keys = layer.keys.expand(len(owner), -1, -1, -1)
            layer.values = layer.values.expand(len(owner), -1, -1, -1)
        else:
            layer.keys, layer.values = layer.keys[owner], layer.values[owner]


# -- whether a model can ------------------------------------------------------------------------------------------


def reason_against(model: Any, module: Any) -> str | None:
    """Why the model's prompts can't be shared, or None. Tried against a plain forward pass."""
    return reason_by_trial(model, lambda: _fault(module))


def _fault(module: Any) -> str | None:
    accepted = accepted_arguments(module)
    missing = [n for n in (cache_name(module), "attention_mask", "position_ids", "use_cache") if n not in accepted]
    if missing:
        return f"its forward takes no {missing[0]}"
    from transformers.cache_utils import DynamicLayer

    odd = sorted({type(x).__name__ for x in _new_cache(module).layers if type(x) is not DynamicLayer})
    if odd:
        return "its cache does not keep every token: " + (
            "sliding-window layers" if "Sliding" in odd[0] else f"{odd[0]} layers"
        )
    return _probe(module)


def _probe(module: Any) -> str | None:
    """Two prompts of different lengths, two rows each, against the same rows in a plain forward pass."""
    ids, lengths = probe_ids(module, 4, 7), [7, 6, 5, 7]
    ids[1, :4], ids[3, :2] = ids[0, :4], ids[2, :2]
    shared = run(module, ids, lengths, [Family([0, 1], 4), Family([2, 3], 2)])
    plain = call(module, ids)
    for k, (row, start) in enumerate(zip(shared.rows.tolist(), shared.offset.tolist(), strict=True)):
        n = lengths[row] - start
        if (difference := disagreement(shared.states[k, :n], plain[row, start : start + n], plain)) is not None:
            return f"its states differ from a plain forward pass by {difference}"
    return None
