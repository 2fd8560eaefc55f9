"""Log-probs forward and backward in three matrix products, where d loss / d logp can be told chunk by chunk.

Positions are walked in chunks. A chunk's logits are made once; its log-probs go out, the upstream gradients come back
from a callback, the logits turn in place into their gradient, and that goes at once into the gradients of the hidden
states and of the head. Nothing is made twice, and no more than one chunk of logits is held.

Axes: N positions, H hidden size, V vocabulary, K ids per position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kenpo.ops.linear_logprob import (
    Statistics,
    Terms,
    Transform,
    add_product,
    check_ids,
    finite_bias,
    product_dtype,
    taken,
    tiles,
    together,
    upstream,
)

#: Bytes of one chunk of logits, and of one tile of it in float32 (what is worked on between two matrix products), by
#: kind of device: on a CPU a tile fits the cache, elsewhere it is large so that few kernels start.
CHUNK_BYTES = {"cpu": 320 * 2**20}
CHUNK_BYTES_ELSEWHERE = 1024 * 2**20
TILE_BYTES = {"cpu": 8 * 2**20}
TILE_BYTES_ELSEWHERE = 256 * 2**20


class Gains(NamedTuple):
    """Upstream gradients of the terms of n positions: of ``logp`` [n], ``entropy`` [n], ``ids_logp`` [n,K]; None: 0."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    ids_logp: Tensor | None = None


def chunk_positions(vocabulary: int, element_size: int, device: str) -> int:
    """Positions whose logits fill one chunk."""
    return max(16, CHUNK_BYTES.get(device, CHUNK_BYTES_ELSEWHERE) // (element_size * max(1, vocabulary)))


@torch.no_grad()
def fused_linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
    gains_of: Callable[[slice, Terms], Gains],
    *,
    bias: Tensor | None = None,
    transform: Transform | None = None,
    entropy: bool = False,
    ids: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
    tile: int | None = None,
    checked: bool = False,
) -> Tensor:
    """Gradient [N,H] of a loss in the hidden states [N,H]; its gradient in the head is added to `d_weight`, `d_bias`.

    `sizes` are the positions of each chunk, N together. `gains_of(at, terms)` gets a chunk's place and its terms
    (``logp``, and if wanted ``entropy`` and ``ids_logp`` at `ids`, −1 padded) and returns their upstream gradients; it
    runs without grad. `d_weight` [V,H] and `d_bias` [V] are accumulators: of the head's dtype or, for a head in bf16,
    of float32, since every chunk adds to them. None: that gradient is not made (a frozen head takes two products).
    Other arguments as in `linear_logprob`; the result is the same up to rounding, in at least float32. N may be 0.

    >>> h, w, d = torch.eye(2), torch.eye(3, 2), torch.zeros(3, 2)
    >>> fused_linear_logprob(h, w, torch.tensor([0, 2]), [1, 1], lambda at, t: Gains(torch.ones(1)), d_weight=d)
    tensor([[ 0.4239, -0.2119],
            [-0.2119, -0.5761]])
    """
    transform = transform or Transform()
    hidden, weight, bias = product_dtype(hidden, weight, bias)
    if not checked:
        check_ids(targets, ids, len(weight))
    wanted = together(targets, ids)
    with torch.autocast(hidden.device.type, enabled=False):  # the products have their dtype; statistics keep theirs
        return _walk(
            hidden, weight, finite_bias(bias), wanted, ids, sizes, gains_of, transform, entropy, d_weight, d_bias, tile
        )


def _walk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets_and_ids: Tensor,
    ids: Tensor | None,
    sizes: Sequence[int],
    gains_of: Callable[[slice, Terms], Gains],
    transform: Transform,
    entropy: bool,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    tile: int | None,
) -> Tensor:
    low = hidden.dtype not in (torch.float32, torch.float64)
    like = hidden.new_empty((0,), dtype=torch.float32 if low else hidden.dtype)
    longest = max(sizes, default=0)
    room = hidden.new_empty(len(weight) * longest)  # one chunk's logits, tile after tile
    tile = tile or default_tile(longest, hidden.device.type)
    d_hidden = torch.zeros_like(hidden, dtype=like.dtype)
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        at = slice(start, start + size)
        h, wanted = hidden[at], targets_and_ids[at]
        values = like.new_zeros(wanted.shape)
        statistics = Statistics.start(like.new_empty(size), int(entropy))
        for v in tiles(len(weight), tile):
            z = _place(room, v, size)
            torch.mm(h, weight[v].T, out=z)
            x = transform.apply(z if bias is None else z.add_(bias[v]))  # in place, but for a low-precision head
            statistics = statistics.add(x, *([x] if entropy else []))
            taken(x, wanted, v, values)
        norm = statistics.norm()
        values.sub_(norm[:, None])
        spread = norm - statistics.mean(0) if entropy else None
        ids_logp = None if ids is None else values[:, 1:].masked_fill(ids[at] < 0, 0.0)
        gains = gains_of(at, Terms(values[:, 0].clone(), spread, ids_logp))
        up = upstream(wanted, norm, gains.logp, gains.entropy, gains.ids_logp, spread)
        for v in tiles(len(weight), tile):
            z = _place(room, v, size)
            x = transform.apply(z) if low else z
            slope = transform.slope(x)
            d = up.logits_gradient(x, v)
            if isinstance(slope, Tensor) or slope != 1.0:
                d = d.mul_(slope)
            if d_bias is not None:
                d_bias[v] += d.sum(0)
            d = d.to(hidden.dtype)
            add_product(d_hidden[at], d, weight[v])
            if d_weight is not None:
                add_product(d_weight[v], d.T, h)
    return d_hidden


def default_tile(positions: int, device: str) -> int:
    """Vocabulary entries per tile of a chunk of that many positions."""
    return max(256, TILE_BYTES.get(device, TILE_BYTES_ELSEWHERE) // (4 * max(1, positions)))


def _place(room: Tensor, at: slice, size: int) -> Tensor:
    """[size, tile] logits of one tile, in one piece of the chunk's memory."""
    return room[at.start * size : at.stop * size].view(size, at.stop - at.start)
