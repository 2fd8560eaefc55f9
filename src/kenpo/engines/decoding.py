"""Decoding loops over a transformers model: with a shared prefill and a cache, with a plain cache, or without one.

All three give next-token logits row by row and are exact; `choose` proves the quick ones against a plain forward pass
and falls back, with a warning, where a model's cache can't do what they need.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kenpo.errors import NonFiniteError
from kenpo.models.loading import context_length, vocabulary_size
from kenpo.models.passes import accepted_arguments, module_inputs
from kenpo.models.trial import relative_difference


class Decoder(Protocol):
    """Holds a batch of growing rows. ``pads``: prompts of different lengths may share a batch."""

    pads: bool

    def __init__(self, model: Any) -> None: ...

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        """Logits [R,V] after the prompts; row r continues prompt ``owner[r]``."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Logits [R,V] after one more token per row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these."""
        ...


class CachedDecoder:
    """Runs each prompt once, hands its cache to all its rows, and drops rows that are done."""

    pads = True

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = accepted_arguments(model)
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"
        missing = [n for n in (self.cache_name, "attention_mask", "position_ids", "use_cache") if n not in accepted]
        if missing:
            raise NotImplementedError(f"its forward takes no {missing[0]}")
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.cache: Any = None
        self.mask: Tensor | None = None  # [R, length so far], None while no row is padded
        self.length: Tensor  # [R] real tokens so far

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        ids, mask = left_padded(prompts, owner.device)
        self.cache = new_cache(self.model)
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp_min(0))
        self.length = mask.sum(1)
        self.mask = None if bool(mask.all()) else mask
        self.keep(owner)
        return logits[owner]

    def step(self, ids: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones((len(ids), 1))], 1)
        mask, positions = self.mask, self.length[:, None]
        self.length = self.length + 1
        return self._forward(ids[:, None], mask, positions)

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.length = self.length[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, self.cache_name: self.cache}
        return self.model(**inputs, use_cache=True, **self.last).logits[:, -1]


class PlainCachedDecoder:
    """Runs every row's prompt by itself (all of one length) with the cache the model makes; drops no rows."""

    pads = False

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = accepted_arguments(model)
        names = [n for n in ("cache", "past_key_values", "cache_params") if n in accepted]
        if not names or "use_cache" not in accepted:
            raise NotImplementedError("its forward takes no cache")
        self.cache_name = names[0]
        self.cache: Any = None
        self.rows: Tensor
        self.current: Tensor

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        self.cache = None
        self.rows = torch.arange(len(owner), device=owner.device)
        return self._forward(torch.tensor([list(p) for p in prompts], device=owner.device)[owner])

    def step(self, ids: Tensor) -> Tensor:
        self.current = self.current.index_put((self.rows,), ids)
        return self._forward(self.current[:, None])[self.rows]

    def keep(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]

    def _forward(self, ids: Tensor) -> Tensor:
        self.current = ids[:, -1]
        past = {} if self.cache is None else {self.cache_name: self.cache}
        out = self.model(input_ids=ids, use_cache=True, **past)
        self.cache = getattr(out, self.cache_name)
        if self.cache is None:
            raise NotImplementedError("it returns no cache")
        return out.logits[:, -1]


class UncachedDecoder:
    """Runs each row from its beginning at every step: slow, and right for every causal model."""

    pads = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.ids: Tensor
        self.length: Tensor

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        width = max(map(len, prompts))
        rows = [list(p) + [0] * (width - len(p)) for p in prompts]  # what stands right of a row is never attended to
        self.ids = torch.tensor(rows, device=owner.device)[owner]
        self.length = torch.tensor([len(p) for p in prompts], device=owner.device)[owner]
        return self._forward()

    def step(self, ids: Tensor) -> Tensor:
        if int(self.length.max()) == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids.new_zeros((len(ids), 1))], 1)
        self.ids = self.ids.scatter(1, self.length[:, None], ids[:, None])
        self.length = self.length + 1
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        self.ids, self.length = self.ids[rows], self.length[rows]

    def _forward(self) -> Tensor:
        logits = self.model(**module_inputs(self.model, self.ids)).logits
        return logits[torch.arange(len(self.ids), device=self.ids.device), self.length - 1]


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and a 0/1 mask [P,L] of prompts that end together."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def new_cache(model: Any) -> Any:
    """An empty cache that grows, with the layers that the model's configuration asks for.

    transformers' plain layers copy all keys and values at every token; those here grow in place.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config)
    growing = _growing_layer()
    cache.layers = [growing() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@functools.cache
def _growing_layer() -> type:
    """A class, made when transformers is loaded anyway: importing this module needs torch only."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        """Keys and values [R,H,L,D] as views of buffers with room to spare. Without gradient only."""

        room = 64

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.buffers: list[Tensor] | None = None
            past = self.get_seq_length()
            length = past + key_states.shape[-2]
            if past == 0:
                self.keys, self.values = key_states, value_states  # a prompt: held as it came
                return self.keys, self.values
            if self.buffers is None or self.buffers[0].shape[-2] < length:
                self.buffers = [self._copied(x, length) for x in (self.keys, self.values) if x is not None]
            for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[..., past:length, :] = new
            self.keys, self.values = (b[..., :length, :] for b in self.buffers)
            return self.keys, self.values

        def _copied(self, x: Tensor, length: int) -> Tensor:
            buffer = x.new_empty((*x.shape[:-2], length + max(self.room, length // 4), x.shape[-1]))
            buffer[..., : x.shape[-2], :] = x
            return buffer

        def reorder_cache(self, beam_idx: Any) -> None:
            self.buffers = None  # the rows that are kept are copied out of them
            super().reorder_cache(beam_idx)

    return GrowingLayer


_chosen: weakref.WeakKeyDictionary[Any, type[Decoder]] = weakref.WeakKeyDictionary()


def choose(model: Any) -> type[Decoder]:
    """The quickest decoder that a probe proves right for the model; warns once where it is not the usual one."""
    if model not in _chosen:
        reasons: list[str] = []
        kind: type[Decoder] = UncachedDecoder
        for kind, what in ((CachedDecoder, "shared prefill"), (PlainCachedDecoder, "cache")):
            reason = fault(model, kind)
            if reason is None:
                break
            reasons.append(f"{what}: {reason}")
        else:
            kind = UncachedDecoder
        if reasons:
            slow = "a cache without shared prefill" if kind is PlainCachedDecoder else "no cache at all"
            name = type(model).__name__
            warnings.warn(f"{name}: sampling uses {slow}, exact but slower ({'; '.join(reasons)})", stacklevel=3)
        _chosen[model] = kind
    return _chosen[model]


@torch.no_grad()
def fault(model: Any, kind: type[Decoder]) -> str | None:
    """Why a decoder is not right for the model, or None: two prompts, shared and dropped rows, two steps.

    NonFiniteError for a model whose plain forward pass gives NaN: no decoder is to blame.
    """
    device = model.get_input_embeddings().weight.device
    size, room = vocabulary_size(model), context_length(model) or 16
    if room < 6:
        return "its context is too short to try it"
    word = [(i * 7919 + 1) % size for i in range(8)]
    prompts = [word[:4], word[4:6]] if kind.pads else [word[:3], word[3:6]]
    try:
        decoder, plain = kind(model), UncachedDecoder(model)
        owner = torch.tensor([0, 0, 1], device=device)
        pairs = [(decoder.start(prompts, owner), plain.start(prompts, owner))]
        pairs.append(_both(decoder, plain, "step", torch.tensor(word[5:8], device=device)))
        rows = torch.tensor([2, 1], device=device)
        decoder.keep(rows)
        plain.keep(rows)
        pairs.append(_both(decoder, plain, "step", torch.tensor(word[2:4], device=device)))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return (lines[0] if lines else type(error).__name__)[:160]
    if any(bool(plain_logits.isnan().any()) for _, plain_logits in pairs):
        raise NonFiniteError(
            "the model's logits are NaN on a plain forward pass; its weights are damaged, or training has diverged "
            "(lower --lr)"
        )
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(pairs[0][0].dtype, 5e-2)
    for a, b in pairs:
        worst = relative_difference(a, b, b)
        if not worst <= tolerance:
            return f"its logits differ from a plain forward pass by {worst:.1g} of their size"
    return None


def _both(a: Decoder, b: Decoder, name: str, argument: Tensor) -> tuple[Tensor, Tensor]:
    return getattr(a, name)(argument), getattr(b, name)(argument)
