"""Attention of rows over a prefix that several of them share and over their own keys, without a copy of the prefix.

``softmax(s·q·[K_p; K_o]ᵀ)·[V_p; V_o]`` falls into two attentions whose outputs are averaged by their normalisers
``λ = logsumexp(s·q·Kᵀ)``: with ``λ = log(e^λp + e^λo)``, ``out = e^(λp−λ)·out_p + e^(λo−λ)·out_o``. All rows of a
prefix are queries of one attention over its keys. Backwards either part takes the joint output and normaliser in place
of its own, which makes its weights and gradients those of the joint softmax.

Both parts run torch's fused attention for CPUs, which also tells the normaliser; it works in float64, float32 and bf16.

Axes: R rows, P prefixes, L keys of a prefix, S queries and own keys of a row, H query heads, G key heads (G divides H,
head h reads key head h // (H/G)), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError


class Owners(NamedTuple):
    """Which prefix each row goes on from: row r lies at ``slot`` [R] of ``prefixes`` times ``size`` places."""

    slot: Tensor
    prefixes: int
    size: int
    full: bool  # every place holds a row, in order

    @classmethod
    def of(cls, owner: Tensor, prefixes: int) -> Owners:
        """From the prefix of each row, [R].

        >>> Owners.of(torch.tensor([0, 1, 0]), 2).slot
        tensor([0, 2, 1])
        """
        count = torch.bincount(owner, minlength=prefixes)
        size = int(count.max())
        order = owner.argsort(stable=True)
        rank = torch.empty_like(owner)
        rank[order] = torch.arange(len(owner), device=owner.device) - (count.cumsum(0) - count)[owner[order]]
        slot = owner * size + rank
        full = len(owner) == prefixes * size and bool((slot == torch.arange(len(owner), device=owner.device)).all())
        return cls(slot, prefixes, size, full)

    @property
    def even(self) -> bool:
        """Whether prefixes have so like numbers of rows that at most half the places are empty."""
        return self.prefixes * self.size <= 2 * len(self.slot)

    def gathered(self, x: Tensor, groups: int) -> Tensor:
        """[R,H,S,E] as the queries of each prefix and key head, [P,G,size·H/G·S,E]; empty places hold 0."""
        if not self.full:
            x = x.new_zeros((self.prefixes * self.size, *x.shape[1:])).index_copy_(0, self.slot, x)
        _, heads, new, last = x.shape
        x = x.view(self.prefixes, self.size, groups, heads // groups, new, last)
        return x.transpose(1, 2).reshape(self.prefixes, groups, -1, last)

    def handed_back(self, x: Tensor, heads: int, new: int) -> Tensor:
        """What `gathered` made, as [R,H,S,E]."""
        groups, last = x.shape[1], x.shape[-1]
        x = x.view(self.prefixes, groups, self.size, heads // groups, new, last).transpose(1, 2)
        x = x.reshape(self.prefixes * self.size, heads, new, last)
        return x if self.full else x[self.slot]


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    owners: Owners,
    *,
    real: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """Output [R,H,S,D] of queries [R,H,S,D] over the row's prefix and its own keys up to each query's place.

    `key`, `value` are [R,G,S,D], or [R,G,N,D] for S = 1, the last of N tokens; `prefix_key`, `prefix_value` [P,G,L,D].
    `real` [P,L] bool is false at keys of padding; every prefix has a real one. `scaling` None: D^-½. Computed in the
    queries' dtype, under autocast in its (float64 stays). Gradients go to all five tensors. Raises `InputError` for own
    keys of another number than the queries, and what torch raises for sizes that its fused attention does not take.
    """
    if query.shape[2] not in (1, key.shape[2]):
        raise InputError(f"{query.shape[2]} queries over {key.shape[2]} own keys: give one query, or one for every key")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind)
    given = [x.to(dtype) for x in (query, key, value, prefix_key, prefix_value)]
    mask = None
    if real is not None:
        mask = given[0].new_zeros(real.shape).masked_fill_(~real, -torch.inf)[:, None, None]
    with torch.autocast(kind, enabled=False):
        return _PrefixAttention.apply(*given, owners, mask, scale)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, prefix_key, prefix_value, owners, mask, scale):
        heads, new, groups = query.shape[1], query.shape[2], key.shape[1]
        far, far_norm = _attend(owners.gathered(query, groups), prefix_key, prefix_value, False, mask, scale)
        far, far_norm = (owners.handed_back(x, heads, new) for x in (far, far_norm[..., None]))
        near, near_norm = _attend(*_own(query, key, value), new > 1, None, scale)
        near, near_norm = near.reshape_as(far), near_norm.reshape_as(far_norm)
        norm = torch.logaddexp(far_norm, near_norm)
        out = torch.lerp(near.to(norm.dtype), far.to(norm.dtype), (far_norm - norm).exp_()).to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, mask, out, norm)
        ctx.owners, ctx.scale = owners, scale
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, prefix_key, prefix_value, mask, out, norm = ctx.saved_tensors
        owners, scale, groups, heads, new = ctx.owners, ctx.scale, key.shape[1], query.shape[1], query.shape[2]
        given = (gradient, query, out, norm)
        far = [owners.gathered(x, groups) for x in given]
        d_far, d_prefix_key, d_prefix_value = _back(far, prefix_key, prefix_value, False, mask, scale)
        own_query, own_key, own_value = _own(query, key, value)
        near = [x.reshape(*own_query.shape[:3], x.shape[-1]) for x in given]
        d_near, d_key, d_value = _back(near, own_key, own_value, new > 1, None, scale)
        d_query = owners.handed_back(d_far, heads, new).add_(d_near.reshape_as(query))
        if own_key.shape != key.shape:
            d_key, d_value = (d.unflatten(1, (groups, -1)).sum(2) for d in (d_key, d_value))
        return d_query, d_key, d_value, d_prefix_key, d_prefix_value, None, None, None


def _own(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A row's queries and own keys with one number of heads: a single query's heads side by side as queries of their
    key head, else every key head once for each of its query heads."""
    rows, heads, new, size = query.shape
    groups = key.shape[1]
    if new == 1:
        return query.reshape(rows, groups, heads // groups, size), key, value
    if groups == heads:
        return query, key, value
    each = heads // groups
    return query, key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and normaliser [.., S]."""
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)


def _back(
    given: Sequence[Tensor], key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from (upstream gradient, query, output, normaliser), the latter two those of
    the attention that this one is a part of."""
    gradient, query, out, norm = given
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return fused(gradient, query, key, value, out, norm[..., 0], 0.0, causal, attn_mask=mask, scale=scale)
