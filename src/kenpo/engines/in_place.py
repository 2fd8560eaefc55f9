"""Decoding in which samples read their prompt's keys where they lie, and hold the keys of their own tokens only."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenpo.engines.decoding import CachedDecoder, Decoder, fault, left_padded, new_cache
from kenpo.models.shared_keys import LEAST_PROMPT_SAMPLING, LEAST_ROWS_SAMPLING, Prefix, reason_against, shared_keys


class InPlaceDecoder(CachedDecoder):
    """Runs each prompt once, for all its rows; see `kenpo.models.shared_keys`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.prefix: Prefix
        self.owner: Tensor  # [R] prompt of each row, among those of `prefix`

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        ids, mask = left_padded(prompts, owner.device)
        self.cache = new_cache(self.model)
        logits = self._forward(ids, mask, (mask.cumsum(1) - 1).clamp_min(0))
        self.prefix = Prefix.of(self.cache, owner, None if bool(mask.all()) else mask.bool())
        self.cache = new_cache(self.model)
        self.owner, self.length = owner, mask.sum(1)[owner]
        return logits[owner]

    def step(self, ids: Tensor) -> Tensor:
        positions = self.length[:, None]
        self.length = self.length + 1
        with shared_keys(self.model, self.prefix):
            return self._forward(ids[:, None], None, positions)

    def keep(self, rows: Tensor) -> None:
        if self.cache.get_seq_length():
            self.cache.reorder_cache(rows)
        self.length = self.length[rows]
        self.prefix, self.owner = self.prefix.owned(self.owner[rows])


_faults: weakref.WeakKeyDictionary[Any, list[str | None]] = weakref.WeakKeyDictionary()


def in_place_if_it_pays(model: Any, kind: type, lengths: Sequence[int], rows: int) -> Decoder:
    """An `InPlaceDecoder` where `kind` is its plain sister, the prompts' `lengths` and the number of `rows` make it
    worth it, and a probe proves it right for the model; else a `kind`."""
    pays = max(lengths) >= LEAST_PROMPT_SAMPLING and rows >= LEAST_ROWS_SAMPLING * len(lengths)
    if kind is not CachedDecoder or not pays or reason_against(model) is not None:
        return kind(model)
    if model not in _faults:
        with torch.autocast("cpu", enabled=False):
            _faults[model] = [fault(model, InPlaceDecoder)]
    return kind(model) if _faults[model][0] else InPlaceDecoder(model)
