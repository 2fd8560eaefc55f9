"""Rows attend to the keys of a prompt that they share, instead of each holding a copy of them.

transformers' cache hands every row the prompt's keys and values as its own, and for its fused attention repeats them
for every query head. Within `shared_keys` the model's attention is `kenpo.ops.prefix_attention`, which reads them where
they lie. Measured on two threads, forward and backward of one attention with 8 rows a prompt: 0.5 of the copying one's
time at prompts of 512 tokens and two query heads a key head, 0.64 at 1,024 and one, level at 64; one new token of a row
(sampling): 0.2 to 0.6 in three shapes of 256 to 1,024 keys and 4 or 8 rows a prompt, on one thread 0.84 to 1.09 of a
whole step at the least sizes below which it is not taken.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.models import short_attention
from kenpo.ops.prefix_attention import Owners, prefix_attention

NAME = "kenpo_shared_keys"
#: Tokens of the longest prompt from which it pays in training, and in sampling if a prompt has as many rows.
LEAST_PROMPT = 64
LEAST_PROMPT_SAMPLING, LEAST_ROWS_SAMPLING = 256, 4
#: Arguments of an attention that it knows nothing of.
FOREIGN = ("softcap", "s_aux", "position_bias", "sliding_window", "head_mask")


class Prefix(NamedTuple):
    """Keys and values [P,G,L,D] of prompts by layer, their ``real`` tokens [P,L] (None: all), and whose they are."""

    keys: list[Tensor | None]
    values: list[Tensor | None]
    real: Tensor | None
    owners: Owners

    @classmethod
    def of(cls, cache: Any, owner: Tensor, real: Tensor | None) -> Prefix:
        """From the cache that a pass over the prompts has filled; row r goes on from prompt ``owner[r]``."""
        layers = [(x.keys, x.values) if x.is_initialized else (None, None) for x in cache.layers]
        prompts = next(k.shape[0] for k, _ in layers if k is not None)
        return cls([k for k, _ in layers], [v for _, v in layers], real, Owners.of(owner, prompts))

    def owned(self, owner: Tensor) -> tuple[Prefix, Tensor]:
        """For other rows: without the prompts that none of them goes on from, and the owners among those left."""
        left, owner = owner.unique(return_inverse=True)
        if len(left) == self.owners.prefixes:
            return self._replace(owners=Owners.of(owner, len(left))), owner
        keys, values = ([None if x is None else x[left] for x in side] for side in (self.keys, self.values))
        real = None if self.real is None else self.real[left]
        return Prefix(keys, values, real, Owners.of(owner, len(left))), owner


#: The prompts of the pass that runs, and how often each layer has read its keys.
_now: ContextVar[tuple[Prefix, list[int]] | None] = ContextVar("shared_keys", default=None)

#: While a model is tried: what the attention of each layer was given.
_seen: ContextVar[dict[int, list[tuple[Tensor, Tensor]]] | None] = ContextVar("seen", default=None)


def reason_against(model: Any) -> str | None:
    """Why a model can't use it before any trial, or None."""
    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", short_attention.NAME):
        return f"{attention} attention"
    weight = model.get_input_embeddings().weight
    return None if weight.device.type == "cpu" else f"its weights are on {weight.device.type}"


@contextlib.contextmanager
def shared_keys(model: Any, prefix: Prefix) -> Iterator[None]:
    """Within it the model's rows, run without mask and prompt, go on from the prompts of `prefix`.

    Meant for one forward pass, in which every layer that has filled the cache reads its keys exactly once; what else a
    model may do with them (other layers' keys, an attention of its own) is a NotImplementedError at the end.
    """
    reads = [0] * len(prefix.keys)
    with _attending(model, _now, (prefix, reads)):
        yield
    for layer, (key, times) in enumerate(zip(prefix.keys, reads, strict=True)):
        if times != (key is not None):
            raise NotImplementedError(f"the keys of layer {layer} are read {times} times in a pass")


def why_not_the_caches(model: Any, run: Callable[[], Any]) -> str | None:
    """Why a model's attention can't read the keys that its cache holds, or None: it gets exactly those of them.

    `run` passes some tokens through the model and returns the cache that it filled. Some models change keys once more
    on their way from the cache to the attention.
    """
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    with _attending(model, _seen, seen):
        cache = run()
    for layer, held in enumerate(cache.layers):
        given = seen.get(layer, [])
        same = len(given) == 1 and all(
            torch.equal(a, b) for a, b in zip(given[0], (held.keys, held.values), strict=True)
        )
        if held.is_initialized and not same:
            return f"the attention of layer {layer} does not get what the cache holds"
    return None


@contextlib.contextmanager
def _attending(model: Any, what: ContextVar[Any], value: Any) -> Iterator[None]:
    """Within it the model's attention is `_attend`, and `what` holds `value`."""
    _register()
    config = model.config.get_text_config(decoder=True)
    usual, config._attn_implementation = config._attn_implementation, NAME
    token = what.set(value)
    try:
        yield
    finally:
        what.reset(token)
        config._attn_implementation = "sdpa" if usual == NAME else usual  # NAME: another thread was here first


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """None: a prompt's rows see all of it, and their own tokens causally."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return None if _now.get() else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **options)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention: [R,H,S,D] queries, [R,G,N,D] own keys and values. [R,S,H,D]."""
    now, seen = _now.get(), _seen.get()
    if seen is not None:
        seen.setdefault(module.layer_idx, []).append((key, value))
    if now is None:  # that, or another thread runs the model while its configuration names this attention
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    prefix, reads = now
    foreign = [n for n in FOREIGN if options.get(n) is not None]
    if attention_mask is not None or foreign or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"shared keys under {foreign[0] if foreign else 'a mask'}")
    prefix_key, prefix_value = prefix.keys[module.layer_idx], prefix.values[module.layer_idx]
    if prefix_key is None or prefix_value is None:
        raise NotImplementedError("shared keys of a layer without any")
    reads[module.layer_idx] += 1
    out = prefix_attention(
        query, key, value, prefix_key, prefix_value, prefix.owners, real=prefix.real, scaling=options.get("scaling")
    )
    return out.transpose(1, 2), None
