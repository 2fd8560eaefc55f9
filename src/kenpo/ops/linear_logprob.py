"""Log-probs and entropies from hidden states and a head, without ever holding the logits of a batch.

``x = transform(hidden @ weightᵀ + bias) / temperature``, ``log p = log_softmax(x)``. The vocabulary is walked in tiles:
[N, tile] logits exist at a time, statistics run online (a running maximum, sum and first moment), and the backward pass
makes each tile again. A tile's share of the head's gradient is one product over all N positions, so it needs no
accumulator in higher precision. Nothing here knows a loss: any upstream gradients of any output are right.
`kenpo.ops.fused_logprob` is the same in three products where the gradients can be told chunk by chunk.

Axes: N positions, H hidden size, V vocabulary, K ids per position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError

#: Bytes of one tile of logits in float32; a tile and its derivative are held together.
TILE_BYTES = 128 * 2**20


class Transform(NamedTuple):
    """What the model does to the head's output before the softmax: ``cap · tanh(s·z/cap)``, then over the temperature.

    ``scale`` s multiplies (None: 1); ``cap`` None: no soft cap. ``temperature`` > 0.
    """

    temperature: float = 1.0
    scale: float | None = None
    cap: float | None = None

    def apply(self, z: Tensor) -> Tensor:
        """Tempered logits in float32 or float64; works in place on `z` if it already has that dtype."""
        x = z if z.dtype in (torch.float32, torch.float64) else z.float()
        if self.scale is not None:
            x = x.mul_(self.scale)
        if self.cap is not None:
            return x.div_(self.cap).tanh_().mul_(self.cap / self.temperature)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def slope(self, x: Tensor) -> Tensor | float:
        """d tempered / d raw at tempered logits `x`: a number where there is no soft cap."""
        rate = (self.scale or 1.0) / self.temperature
        if self.cap is None:
            return rate
        t = x * (self.temperature / self.cap)
        return t.mul_(t).neg_().add_(1.0).mul_(rate)


class Second(NamedTuple):
    """A second distribution over the same vocabulary, a constant: its hidden states [N,H'] and head.

    ``reverse`` False: KL(first‖second); True: KL(second‖first).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transform: Transform = Transform()
    reverse: bool = False

    def tile(self, at: slice) -> Tensor:
        """[N, tile] of its tempered logits."""
        return self.transform.apply(_raw(self.hidden, self.weight, self.bias, at))


class Terms(NamedTuple):
    """``logp`` [N] of the targets; ``entropy`` [N] in nats, ``ids_logp`` [N,K] and ``kl`` [N] in nats, or None."""

    logp: Tensor
    entropy: Tensor | None = None
    ids_logp: Tensor | None = None
    kl: Tensor | None = None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: Transform | None = None,
    entropy: bool = False,
    ids: Tensor | None = None,
    second: Second | None = None,
    tile: int | None = None,
    checked: bool = False,
) -> Terms:
    """Log-probs of `targets` [N] (and entropies, log-probs of `ids` [N,K], −1 padded with 0, and the divergence from
    `second`) of hidden states [N,H].

    `weight` [V,H] and `bias` [V] are the head. Equal to logits → log_softmax → gather in value and gradient; exact for
    every upstream gradient, entropy's included. No gradient is made for what does not require one (a frozen head costs
    one product less). Under autocast the products run in its dtype; statistics are float32, float64 stays float64.
    `tile` is the vocabulary entries per step (default: `TILE_BYTES` of logits). `checked`: the ids are known to be in
    the vocabulary, so that the host need not wait for them.

    >>> h, w = torch.eye(2, dtype=torch.float64), torch.eye(3, 2, dtype=torch.float64)
    >>> linear_logprob(h, w, torch.tensor([0, 2])).logp.exp()
    tensor([0.5761, 0.2119], dtype=torch.float64)
    """
    transform = transform or Transform()
    hidden, weight, bias = product_dtype(hidden, weight, bias)
    bias = finite_bias(bias)
    if not checked:
        check_ids(targets, ids, len(weight))
    if second is not None:
        if len(second.weight) != len(weight):
            raise InputError(f"a second head over {len(second.weight)} entries, the first has {len(weight)}: no KL")
        h, w, b = product_dtype(second.hidden.detach(), second.weight.detach(), second.bias)
        second = second._replace(hidden=h, weight=w, bias=None if b is None else finite_bias(b.detach()))
    tile = tile or default_tile(len(hidden))
    with torch.autocast(hidden.device.type, enabled=False):  # the products have their dtype; statistics keep theirs
        return Terms(*_LinearLogprob.apply(hidden, weight, bias, targets, ids, transform, entropy, second, tile))


def check_ids(targets: Tensor, ids: Tensor | None, vocabulary: int) -> None:
    """InputError for a target outside the vocabulary, an id that is neither in it nor −1, or ids that are not int64."""
    for name, x, least in (("targets", targets, 0), ("ids", ids, -1)):
        if x is not None and x.dtype != torch.int64:
            raise InputError(f"{name}: ids are int64, got {x.dtype}; call .long() on them")
        if x is not None and x.numel() and not least <= int(x.min()) <= int(x.max()) < vocabulary:
            worst = int(x.min()) if int(x.min()) < least else int(x.max())
            raise InputError(f"{name}: id {worst} is outside the vocabulary of {vocabulary}")


def product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The head's operands in the dtype of its products: autocast's where that is on, else the weight's."""
    dtype = weight.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def default_tile(positions: int) -> int:
    """Vocabulary entries per tile for that many positions."""
    return max(256, TILE_BYTES // (4 * max(1, positions)))


def tiles(vocabulary: int, tile: int) -> Iterator[slice]:
    """The vocabulary in slices of `tile` entries."""
    return (slice(a, min(a + tile, vocabulary)) for a in range(0, vocabulary, tile))


def _raw(hidden: Tensor, weight: Tensor, bias: Tensor | None, at: slice) -> Tensor:
    """[N, tile] outputs of the head, before the transform."""
    z = hidden @ weight[at].T
    return z if bias is None else z.add_(bias[at])


def finite_bias(bias: Tensor | None) -> Tensor | None:
    """`bias` with −inf (an id that is never sampled) as the lowest number that a product with 0 leaves 0."""
    if bias is None:
        return None
    return bias.clamp(min=-1e30 if bias.dtype != torch.float16 else -6e4)


class Statistics(NamedTuple):
    """Running maximum and normaliser [N] of rows of logits seen in tiles, and first moments of what goes with them."""

    top: Tensor
    total: Tensor
    moments: tuple[Tensor, ...]

    @classmethod
    def start(cls, like: Tensor, moments: int = 0) -> Statistics:
        """Of no logits at all; `like` [N] gives device and dtype."""
        none = torch.zeros_like(like)
        return cls(torch.full_like(like, -torch.inf), none, (none,) * moments)

    def add(self, x: Tensor, *others: Tensor) -> Statistics:
        """With the next tile [N, tile] taken in; the moments are those of `others`, likewise [N, tile]."""
        top = torch.maximum(self.top, x.amax(-1))
        keep = (self.top - top).exp_()
        e = (x - top[:, None]).exp_()
        total = self.total * keep + e.sum(-1)
        moments = [m * keep + torch.linalg.vecdot(e, o) for m, o in zip(self.moments, others, strict=True)]
        return Statistics(top, total, tuple(moments))

    def norm(self) -> Tensor:
        """[N] logsumexp."""
        return self.top + self.total.log()

    def mean(self, moment: int) -> Tensor:
        """[N] expectation under the softmax."""
        return self.moments[moment] / self.total


def taken(x: Tensor, ids: Tensor, at: slice, into: Tensor) -> None:
    """Copy the logits of those `ids` [N,K] that lie in this tile into `into` [N,K]."""
    inside = (ids >= at.start) & (ids < at.stop)
    local = (ids - at.start).clamp_(0, at.stop - at.start - 1)
    into.copy_(torch.where(inside, x.gather(-1, local), into))


def together(targets: Tensor, ids: Tensor | None) -> Tensor:
    """[N,1+K] targets and further ids."""
    return targets[:, None] if ids is None else torch.cat([targets[:, None], ids], 1)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ids, transform, entropy, second, tile):
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        like = hidden.new_empty((len(hidden),), dtype=dtype)
        reverse = second is not None and second.reverse
        ours = Statistics.start(like, int(entropy) + int(second is not None and not reverse))
        theirs = Statistics.start(like, int(reverse))
        wanted = together(targets, ids)
        values = like.new_zeros(wanted.shape)
        for at in tiles(len(weight), tile):
            x = transform.apply(_raw(hidden, weight, bias, at))
            others = [x] if entropy else []
            if second is not None:
                y = second.tile(at).to(dtype)
                theirs = theirs.add(y, *([y - x] if reverse else []))
                others += [] if reverse else [x - y]
            ours = ours.add(x, *others)
            taken(x, wanted, at, values)
        norm = ours.norm()
        values.sub_(norm[:, None])
        h = norm - ours.mean(0) if entropy else None
        ids_logp = None if ids is None else values[:, 1:].masked_fill(ids < 0, 0.0)
        kl = norm2 = None
        if second is not None:
            norm2 = theirs.norm()
            kl = theirs.mean(0) - norm2 + norm if reverse else ours.mean(-1) - norm + norm2
        ctx.save_for_backward(hidden, weight, bias, wanted, norm, h, norm2, kl)
        ctx.transform, ctx.tile, ctx.second = transform, tile, second
        ctx.set_materialize_grads(False)
        return values[:, 0].clone(), h, ids_logp, kl

    @staticmethod
    def backward(ctx, g_logp, g_entropy, g_ids, g_kl):
        hidden, weight, bias, wanted, norm, h, norm2, kl = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        up = upstream(wanted, norm, g_logp, g_entropy, g_ids, h)
        d_hidden = torch.zeros_like(hidden, dtype=norm.dtype) if want_hidden else None
        d_weight = torch.empty_like(weight) if want_weight else None
        d_bias = torch.empty_like(bias) if bias is not None and want_bias else None
        for at in tiles(len(weight), ctx.tile):
            x = ctx.transform.apply(_raw(hidden, weight, bias, at))
            slope = ctx.transform.slope(x)
            part = None
            if g_kl is not None:
                part = _kl_gradient(x, ctx.second.tile(at).to(x.dtype), norm, norm2, kl, g_kl, ctx.second.reverse)
            d = up.logits_gradient(x, at)
            d = d if part is None else d.add_(part)
            d = d.mul_(slope) if isinstance(slope, Tensor) or slope != 1.0 else d
            if d_bias is not None:
                d_bias[at] = d.sum(0).to(d_bias.dtype)
            d = d.to(weight.dtype)
            if d_hidden is not None:
                add_product(d_hidden, d, weight[at])
            if d_weight is not None:
                torch.mm(d.T, hidden, out=d_weight[at])
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, *[None] * 6


def _kl_gradient(x: Tensor, y: Tensor, norm: Tensor, norm2: Tensor, kl: Tensor, g: Tensor, reverse: bool) -> Tensor:
    """[N, tile] gradient of g·KL in x: ``p·(log p − log q − KL)``, or ``p − q`` where the second stands first."""
    p = (x - norm[:, None]).exp_()
    if reverse:
        return p.sub_((y - norm2[:, None]).exp_()).mul_(g[:, None])
    return p.mul_((x - y).sub_((norm - norm2 + kl)[:, None])).mul_(g[:, None])


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``into += a @ b``: inside the product where the dtypes agree, else of the product as rounded."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(a @ b)


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
