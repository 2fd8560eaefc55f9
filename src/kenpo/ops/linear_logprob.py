"""Log-probs and entropies from hidden states and a head, without ever holding the logits of a batch.

``x = transform(hidden @ weightᵀ + bias) / temperature``, ``log p = log_softmax(x)``. The vocabulary is walked in tiles:
[N, tile] logits exist at a time, statistics run online (a running maximum, sum and first moment), and the backward pass
makes each tile again. A tile's share of the head's gradient is one product over all N positions, so it needs no
accumulator in higher precision. Nothing here knows a loss: any upstream gradients of any output are right.

Axes: N positions, H hidden size, V vocabulary, K ids per position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: Bytes of one tile of logits in float32; a tile and its derivative are held together.
TILE_BYTES = 128 * 2**20


class Transform(NamedTuple):
    """What the model does to the head's output before the softmax: ``cap · tanh(s·z/cap)``, then over the temperature.

    ``scale`` s multiplies (None: 1); ``cap`` None: no soft cap. ``temperature`` > 0.
    """

    temperature: float = 1.0
    scale: float | None = None
    cap: float | None = None

    def apply(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """(tempered logits, d tempered / d z or None where it is the constant `slope`), in float32 or float64.

        Works in place on `z` if it already has that dtype.
        """
        x = z if z.dtype in (torch.float32, torch.float64) else z.float()
        if self.scale is not None:
            x = x.mul_(self.scale)
        if self.cap is None:
            return (x if self.temperature == 1.0 else x.div_(self.temperature)), None
        t = x.div_(self.cap).tanh_()
        slope = (1 - t * t).mul_((self.scale or 1.0) / self.temperature)
        return t.mul_(self.cap / self.temperature), slope

    @property
    def slope(self) -> float:
        """d tempered / d z where there is no soft cap."""
        return (self.scale or 1.0) / self.temperature


class Terms(NamedTuple):
    """``logp`` [N] of the targets; ``entropy`` [N] in nats or None; ``ids_logp`` [N,K] or None."""

    logp: Tensor
    entropy: Tensor | None
    ids_logp: Tensor | None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: Transform | None = None,
    entropy: bool = False,
    ids: Tensor | None = None,
    tile: int | None = None,
) -> Terms:
    """Log-probs of `targets` [N] (and entropies, and log-probs of `ids` [N,K], −1 padded with 0) of hidden states
    [N,H].

    `weight` [V,H] and `bias` [V] are the head. Equal to logits → log_softmax → gather in value and gradient; exact for
    every upstream gradient, entropy's included. No gradient is made for what does not require one (a frozen head costs
    one product less). Under autocast the products run in its dtype; statistics are float32, float64 stays float64.
    `tile` is the vocabulary entries per step (default: `TILE_BYTES` of logits).

    >>> h, w = torch.eye(2, dtype=torch.float64), torch.eye(3, 2, dtype=torch.float64)
    >>> linear_logprob(h, w, torch.tensor([0, 2])).logp.exp()
    tensor([0.5761, 0.2119], dtype=torch.float64)
    """
    transform = transform or Transform()
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    elif hidden.dtype != weight.dtype:
        hidden = hidden.to(weight.dtype)
    tile = tile or default_tile(len(hidden))
    outputs = _LinearLogprob.apply(hidden, weight, bias, targets, ids, transform, entropy, tile)
    return Terms(outputs[0], outputs[1], outputs[2])


def default_tile(positions: int) -> int:
    """Vocabulary entries per tile for that many positions."""
    return max(256, TILE_BYTES // (4 * max(1, positions)))


def _tiles(vocabulary: int, tile: int) -> Iterator[slice]:
    return (slice(a, min(a + tile, vocabulary)) for a in range(0, vocabulary, tile))


def _raw(hidden: Tensor, weight: Tensor, bias: Tensor | None, at: slice) -> Tensor:
    """[N, tile] outputs of the head, before the transform."""
    z = hidden @ weight[at].T
    return z if bias is None else z.add_(bias[at])


class Statistics(NamedTuple):
    """Running maximum, normaliser and (if entropies are wanted) first moment [N] of rows of logits seen in tiles."""

    top: Tensor
    total: Tensor
    moment: Tensor | None

    @classmethod
    def start(cls, like: Tensor, moment: bool) -> Statistics:
        """Of no logits at all; `like` [N] gives device and dtype."""
        none = torch.zeros_like(like)
        return cls(torch.full_like(like, -torch.inf), none, none.clone() if moment else None)

    def add(self, x: Tensor) -> Statistics:
        """With the next tile [N, tile] taken in; leaves `x` as it is."""
        top = torch.maximum(self.top, x.amax(-1))
        keep = (self.top - top).exp_()
        e = (x - top[:, None]).exp_()
        total = self.total * keep + e.sum(-1)
        return Statistics(top, total, None if self.moment is None else self.moment * keep + e.mul_(x).sum(-1))

    def norm(self) -> Tensor:
        """[N] logsumexp."""
        return self.top + self.total.log()

    def entropy(self, norm: Tensor) -> Tensor:
        """[N] entropy: logsumexp − E[x]."""
        assert self.moment is not None
        return norm - self.moment / self.total


def _taken(x: Tensor, ids: Tensor, at: slice, into: Tensor) -> None:
    """Copy the logits of those `ids` [N,K] that lie in this tile into `into` [N,K]."""
    inside = (ids >= at.start) & (ids < at.stop)
    local = (ids - at.start).clamp_(0, at.stop - at.start - 1)
    into.copy_(torch.where(inside, x.gather(-1, local), into))


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ids, transform, entropy, tile):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        like = hidden.new_empty((len(hidden),), dtype=dtype)
        statistics = Statistics.start(like, entropy)
        wanted = targets[:, None] if ids is None else torch.cat([targets[:, None], ids], 1)
        values = like.new_zeros(wanted.shape)
        for at in _tiles(len(weight), tile):
            x, _ = transform.apply(_raw(hidden, weight, bias, at))
            statistics = statistics.add(x)
            _taken(x, wanted, at, values)
        norm = statistics.norm()
        values.sub_(norm[:, None])
        h = statistics.entropy(norm) if entropy else None
        ids_logp = None if ids is None else values[:, 1:].masked_fill(ids < 0, 0.0)
        ctx.save_for_backward(hidden, weight, bias, wanted, norm, h)
        ctx.transform, ctx.tile = transform, tile
        return values[:, 0].clone(), h, ids_logp

    @staticmethod
    def backward(ctx, g_logp, g_entropy, g_ids):
        hidden, weight, bias, wanted, norm, h = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        up = upstream(wanted, norm, g_logp, g_entropy, g_ids, h)
        d_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if want_hidden else None
        d_weight = torch.empty_like(weight) if want_weight else None
        d_bias = torch.empty_like(bias) if bias is not None and want_bias else None
        for at in _tiles(len(weight), ctx.tile):
            x, slope = ctx.transform.apply(_raw(hidden, weight, bias, at))
            d = up.logits_gradient(x, at)
            d = d.mul_(slope) if slope is not None else d if ctx.transform.slope == 1 else d.mul_(ctx.transform.slope)
            if d_bias is not None:
                d_bias[at] = d.sum(0).to(d_bias.dtype)
            d = d.to(weight.dtype)
            if d_hidden is not None:
                part = d @ weight[at]
                d_hidden += part
            if d_weight is not None:
                torch.mm(d.T, hidden, out=d_weight[at])
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


class Upstream(NamedTuple):
    """Upstream gradients of the terms of N positions, ready to be turned into d loss / d logits tile by tile.

    ``d/dx_j = Σ_k g_k·[id_k = j] − (Σ_k g_k)·p_j − g_H·p_j·(log p_j + H)``.
    """

    ids: Tensor  # [N,1+K], −1: none
    gains: Tensor  # [N,1+K] upstream gradients of their log-probs
    norm: Tensor  # [N]
    total: Tensor  # [N] Σ gains
    g_entropy: Tensor | None  # [N]
    entropy: Tensor | None  # [N]

    def logits_gradient(self, x: Tensor, at: slice) -> Tensor:
        """[N, tile] gradient of the tempered logits of one tile; works in place on `x`."""
        x.sub_(self.norm[:, None])
        if self.g_entropy is None or self.entropy is None:
            d = x.exp_().mul_(-self.total[:, None])
        else:
            d = x.exp()
            factor = x.add_(self.entropy[:, None]).mul_(-self.g_entropy[:, None]).sub_(self.total[:, None])
            d.mul_(factor)
        inside = (self.ids >= at.start) & (self.ids < at.stop)
        local = (self.ids - at.start).clamp_(0, at.stop - at.start - 1)
        return d.scatter_add_(-1, local, torch.where(inside, self.gains, self.gains.new_zeros(())))


def upstream(
    wanted: Tensor,
    norm: Tensor,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    g_ids: Tensor | None,
    entropy: Tensor | None,
) -> Upstream:
    """Collect the upstream gradients; absent ones are 0 and those of padded ids are dropped."""
    gains = norm.new_zeros(wanted.shape)
    if g_logp is not None:
        gains[:, 0] = g_logp
    if g_ids is not None:
        gains[:, 1:] = g_ids
    gains.masked_fill_(wanted < 0, 0.0)
    return Upstream(wanted, gains, norm, gains.sum(-1), None if entropy is None else g_entropy, entropy)
