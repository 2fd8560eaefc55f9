"""Decoding in which samples read their prompt's keys where they lie, and hold the keys of their own tokens only."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kenpo.engines.decoding import CachedDecoder, Decoder, fault, new_cache
from kenpo.models.policy import copies_keys
from kenpo.models.shared_keys import LEAST_PROMPT_SAMPLING, LEAST_ROWS_SAMPLING, Prefix, shared_keys
from kenpo.models.trial import Known, reason_by_trial
from kenpo.ops.prefix_attention import Owners


class InPlaceDecoder(CachedDecoder):
    """Runs each prompt once, for all its rows; see `kenpo.models.shared_keys`.

    Once few rows a prompt are left, or most of those of one prompt, it copies the keys and goes on like its sister.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.prefix: Prefix | None = None  # None: the rows hold copies
        self.owner: Tensor  # [R] prompt of each row, among those of `prefix`

    def start(self, prompts: Sequence[Sequence[int]], owner: Tensor) -> Tensor:
        logits = self._run_prompts(prompts, owner.device)
        self.prefix = Prefix.of(self.cache, owner, None if self.mask is None else self.mask.bool())
        self.cache, self.mask = new_cache(self.model), None
        self.owner, self.length = owner, self.length[owner]
        return logits[owner]

    def step(self, ids: Tensor) -> Tensor:
        if self.prefix is None:
            return super().step(ids)
        positions = self.length[:, None]
        self.length = self.length + 1
        with shared_keys(self.model, self.prefix):
            return self._forward(ids[:, None], None, positions)

    def keep(self, rows: Tensor) -> None:
        if self.prefix is None:
            super().keep(rows)
            return
        own = self.cache.get_seq_length()
        if own:
            self.cache.reorder_cache(rows)
        self.length = self.length[rows]
        self.prefix, self.owner = self.prefix.owned(self.owner[rows])
        if own and not _pays(self.prefix.owners):
            self._copy(self.prefix, own)

    def _copy(self, prefix: Prefix, own: int) -> None:
        """Give every row a copy of its prompt's keys, in front of its `own` tokens."""
        for layer, key, value in zip(self.cache.layers, prefix.keys, prefix.values, strict=True):
            if key is not None and value is not None:
                layer.prepend(key[self.owner], value[self.owner])
        if prefix.real is not None:
            real = prefix.real[self.owner].long()
            self.mask = torch.cat([real, real.new_ones((len(real), own))], 1)
        self.prefix = None


_faults: Known = weakref.WeakKeyDictionary()


def in_place_if_it_pays(model: Any, kind: type, lengths: Sequence[int], owner: Tensor) -> Decoder:
    """An `InPlaceDecoder` where `kind` is its plain sister, the prompts' `lengths` and their numbers of rows make it
    worth it, and a trial proves it right for the model; else a `kind`. Row r goes on from prompt ``owner[r]``."""
    pays = max(lengths) >= LEAST_PROMPT_SAMPLING and _pays(Owners.of(owner, len(lengths)))
    if kind is not CachedDecoder or not pays:
        return kind(model)
    reason = reason_by_trial(_faults, model, lambda: copies_keys(model) or fault(model, InPlaceDecoder))
    return kind(model) if reason else InPlaceDecoder(model)


def _pays(owners: Owners) -> bool:
    """Enough rows a prompt, and of like numbers."""
    return owners.even and len(owners.slot) >= LEAST_ROWS_SAMPLING * owners.prefixes
