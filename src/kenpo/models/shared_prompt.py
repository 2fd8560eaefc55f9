"""A prompt that several rows share runs once: its keys and values are handed to all of them, with exact gradients.

The tokens before the last prompt token run by themselves and fill transformers' cache; the rows go on from there, each
with a copy of the cache or, where that pays, reading the prompt's keys where they lie (`kenpo.models.shared_keys`). The
backward pass adds the rows' gradients up in the prompt's keys and values, so nothing is approximated. Prompts of
different lengths run side by side, padded at the left under a mask, positions counting real tokens (measured: as quick
as one prompt at a time, and far quicker where prompts are short).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.models.checkpointing import checkpointing
from kenpo.models.head import accepted_arguments, module_inputs
from kenpo.models.trial import Known, reason_by_trial, relative_difference

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


def families(prefixes: Sequence[bytes], prompts: Sequence[int], lengths: Sequence[int]) -> tuple[list[Family], int]:
    """Rows with identical prefixes for which sharing pays, and the tokens it saves in all."""
    same: dict[bytes, list[int]] = {}
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
    device = ids.device
    rows = [r for family in found for r in family.rows]
    index = torch.tensor(rows, device=device)
    owner = torch.repeat_interleave(torch.tensor([len(f.rows) for f in found])).to(device)
    prompts = torch.tensor([f.prompt for f in found], device=device)
    widest = max(f.prompt for f in found)
    place = torch.arange(widest, device=device) - (widest - prompts)[:, None]  # [F,P], negative on the padding
    first = torch.tensor([f.rows[0] for f in found], device=device)
    padded = any(f.prompt < widest for f in found)
    cache = _new_cache(module)
    _forward(module, ids[first[:, None], place.clamp_min(0)], place.clamp_min(0), place >= 0 if padded else None, cache)
    offset = prompts[owner]
    width = max(lengths[r] - f.prompt for f in found for r in f.rows)
    positions = offset[:, None] + torch.arange(width, device=device)
    # What stands beyond a row's end is padding at the right, which nothing attends to and nothing reads.
    rest = ids[index[:, None], positions.clamp_max(ids.shape[1] - 1)]
    last = torch.tensor([lengths[r] for r in rows], device=device)[:, None] - 1
    positions = torch.minimum(positions, last)
    real = place >= 0 if padded else None
    _hand_out(cache, owner, len(found))
    mask = None if real is None else torch.cat([real[owner], torch.ones_like(positions, dtype=torch.bool)], 1)
    return Shared(_forward(module, rest, positions, mask, cache), index, offset)


def _forward(module: Any, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": cache is not None}
    if cache is not None:
        inputs[_cache_name(module)] = cache
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    out = module(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _cache_name(module: Any) -> str:
    return "cache" if "cache" in accepted_arguments(module) else "past_key_values"


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

_reasons: Known = weakref.WeakKeyDictionary()


def reason_against(model: Any, module: Any) -> str | None:
    """Why the model's prompts can't be shared in training, or None. Proven once against a plain forward pass."""
    if checkpointing(model):
        return "gradient checkpointing runs layers twice, which would fill a cache twice"
    return reason_by_trial(_reasons, model, lambda: _fault(module))


_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_once(model: Any, reason: str) -> None:
    """Say, once per model, that a batch which would gain runs every prompt once per row."""
    if model not in _warned:
        _warned.add(model)
        name = type(model).__name__
        warnings.warn(f"{name}: prompts run once per sample, exact but slower ({reason})", stacklevel=4)


def _fault(module: Any) -> str | None:
    accepted = accepted_arguments(module)
    missing = [n for n in (_cache_name(module), "attention_mask", "position_ids", "use_cache") if n not in accepted]
    if missing:
        return f"its forward takes no {missing[0]}"
    from transformers.cache_utils import DynamicLayer

    odd = sorted({type(x).__name__ for x in _new_cache(module).layers if type(x) is not DynamicLayer})
    if odd:
        return "its cache does not keep every token: " + (
            "sliding-window layers" if "Sliding" in odd[0] else f"{odd[0]} layers"
        )
    return _probe(module)


@torch.no_grad()
def _probe(module: Any) -> str | None:
    """Two prompts of different lengths, two rows each, against the same rows in a plain forward pass."""
    weight = module.get_input_embeddings().weight
    ids = (torch.arange(1, 29, device=weight.device) * 7919 % int(weight.shape[0])).reshape(4, 7)
    ids[1, :4], ids[3, :2] = ids[0, :4], ids[2, :2]
    lengths = [7, 6, 5, 7]
    shared = run(module, ids, lengths, [Family([0, 1], 4), Family([2, 3], 2)])
    out = module(**module_inputs(module, ids))
    plain = out.logits if hasattr(out, "logits") else out.last_hidden_state
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(plain.dtype, 5e-2)
    for k, (row, start) in enumerate(zip(shared.rows.tolist(), shared.offset.tolist(), strict=True)):
        n = lengths[row] - start
        worst = relative_difference(shared.states[k, :n], plain[row, start : start + n], plain)
        if not worst <= tolerance:
            return f"its states differ from a plain forward pass by {worst:.1g} of their size"
    return None
