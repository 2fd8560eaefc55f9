"""A divergence between two models over a vocabulary, from hidden states and two heads, without holding [N, V].

Positions are walked in chunks: a chunk's logits of both models are made, turned into its divergences (forward) or into
its gradient (backward, where they are made again), and dropped. Inside a chunk a few rows at a time are worked on, so
that one chunk of logits per model is all the memory there is.

Axes: N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kenpo.divergence import Divergence
from kenpo.errors import InputError
from kenpo.ops.linear_logprob import Second, Transform, add_product, finite_bias, product_dtype
from kenpo.ops.vocabulary import LEAST_TAIL, slopes, support

#: Bytes of one model's logits of a chunk in float32, by kind of device, and of the rows worked on at a time.
CHUNK_BYTES = {"cpu": 96 * 2**20}
CHUNK_BYTES_ELSEWHERE = 512 * 2**20
ROW_BYTES = {"cpu": 8 * 2**20}
ROW_BYTES_ELSEWHERE = 128 * 2**20


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Second,
    spec: Divergence | None = None,
    *,
    bias: Tensor | None = None,
    transform: Transform | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[N] divergences of the student's head over [N,H] hidden states from `teacher`'s, in nats.

    Equal to logits → `kenpo.ops.vocabulary.divergence` in value and gradient. Gradients go to `hidden`, `weight` [V,H]
    and `bias` [V] where they require one; none goes to the teacher, whose hidden size may differ but whose vocabulary
    may not (`InputError`). Temperatures stand in the two transforms. ``teacher.reverse`` is not read: `spec` says the
    direction. `chunk`: positions at a time. Under autocast products run in its dtype, statistics in float32.

    >>> h, w = torch.eye(2, dtype=torch.float64), torch.eye(3, 2, dtype=torch.float64)
    >>> linear_divergence(h, w, Second(h.flip(0), w), Divergence("forward"))
    tensor([0.3642, 0.3642], dtype=torch.float64)
    """
    spec, transform = spec or Divergence(), transform or Transform()
    if len(teacher.weight) != len(weight):
        raise InputError(
            f"a teacher over {len(teacher.weight)} entries, a student over {len(weight)}: no divergence between them"
        )
    if len(teacher.hidden) != len(hidden):
        raise InputError(f"the teacher has {len(teacher.hidden)} positions, the student {len(hidden)}")
    hidden, weight, bias = product_dtype(hidden, weight, bias)
    h, w, b = product_dtype(teacher.hidden.detach(), teacher.weight.detach(), teacher.bias)
    teacher = teacher._replace(hidden=h, weight=w, bias=None if b is None else finite_bias(b.detach()))
    chunk = chunk or _positions(len(weight), hidden.device.type, CHUNK_BYTES, CHUNK_BYTES_ELSEWHERE)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearDivergence.apply(hidden, weight, finite_bias(bias), teacher, transform, spec, chunk)


def _positions(vocabulary: int, device: str, table: dict[str, int], elsewhere: int) -> int:
    return max(1, table.get(device, elsewhere) // (4 * max(1, vocabulary)))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: Transform, at: slice) -> Tensor:
    """[n, V] tempered logits of one chunk, in float32 or float64."""
    z = hidden[at] @ weight.T
    return transform.apply(z if bias is None else z.add_(bias))


def _row_slices(x: Tensor):
    step = _positions(x.shape[-1], x.device.type, ROW_BYTES, ROW_BYTES_ELSEWHERE)
    return (slice(a, a + step) for a in range(0, len(x), step))


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher, transform, spec, chunk):
        out = hidden.new_empty(len(hidden), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        for at in (slice(a, a + chunk) for a in range(0, len(hidden), chunk)):
            x, y = _both(hidden, weight, bias, transform, teacher, at)
            for rows in _row_slices(x):
                out[at][rows] = _turned(x[rows], y[rows], spec, None)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rest = teacher, transform, spec, chunk
        return out

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias = ctx.saved_tensors
        teacher, transform, spec, chunk = ctx.rest
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        wide = upstream.dtype  # a head in half precision is added to by every chunk: in float32
        d_hidden = torch.zeros_like(hidden, dtype=wide) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and want_bias else None
        for at in (slice(a, a + chunk) for a in range(0, len(hidden), chunk)):
            x, y = _both(hidden, weight, bias, transform, teacher, at)
            for rows in _row_slices(x):
                slope = transform.slope(x[rows].clone())
                _turned(x[rows], y[rows], spec, upstream[at][rows])
                x[rows] *= slope
            if d_bias is not None:
                d_bias += x.sum(0)
            d = x.to(weight.dtype)
            if d_hidden is not None:
                add_product(d_hidden[at], d, weight)
            if d_weight is not None:
                add_product(d_weight, d.T, hidden[at])
        made = ((d_hidden, hidden), (d_weight, weight), (d_bias, bias))
        return *(None if d is None else d.to(own.dtype) for d, own in made), *[None] * 4


def _both(hidden, weight, bias, transform, teacher, at) -> tuple[Tensor, Tensor]:
    """[n, V] tempered logits of the student and of the teacher."""
    x = _logits(hidden, weight, bias, transform, at)
    y = _logits(teacher.hidden, teacher.weight, teacher.bias, teacher.transform, at)
    return x, y.to(x.dtype)


def _turned(x: Tensor, y: Tensor, spec: Divergence, upstream: Tensor | None) -> Tensor:
    """[n] divergences of [n, V] tempered logits; with `upstream` [n], `x` becomes upstream · dD/dx in place."""
    p = x.sub_(x.logsumexp(-1, keepdim=True))
    q = y.sub_(y.logsumexp(-1, keepdim=True))
    if spec.top is None or spec.top >= x.shape[-1]:
        value, g = slopes(p, q, spec)
        if upstream is not None:
            total = g.sum(-1, keepdim=True)
            x.copy_(g.sub_(p.exp_().mul_(total)).mul_(upstream.unsqueeze(-1)))
        return value
    return _on_support(p, q, spec, upstream)


def _on_support(p: Tensor, q: Tensor, spec: Divergence, upstream: Tensor | None) -> Tensor:
    """`_turned` where only the support's tokens are told apart; `p` [n, V] becomes the gradient."""
    ids = support(p, q, spec)
    mine, theirs = p.gather(-1, ids), q.gather(-1, ids)
    if spec.rest == "renormalised":
        mine, theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
        value, g = slopes(mine, theirs, spec)
        if upstream is not None:
            inner = (g - mine.exp() * g.sum(-1, keepdim=True)) * upstream.unsqueeze(-1)
            p.zero_().scatter_(-1, ids, inner)
        return value
    tail = None
    if spec.rest == "tail":
        tail, their_tail = (x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for x in (p, q))
        low = math.log(LEAST_TAIL)
        mine = torch.cat([mine, tail.clamp(min=low)], -1)
        theirs = torch.cat([theirs, their_tail.clamp(min=low)], -1)
    value, g = slopes(mine, theirs, spec)
    if upstream is None:
        return value
    total = g.sum(-1, keepdim=True)
    up = upstream.unsqueeze(-1)
    if tail is None:
        d = p.exp().mul_(-total * up)
        p.copy_(d.scatter_add_(-1, ids, g * up))
        return value
    # A held tail has no gradient of its own; what it shares with the others through ΣG counts the free ones only.
    free = (tail > math.log(LEAST_TAIL)).to(p.dtype)
    g_tail = g[:, -1:] * free
    total = g[:, :-1].sum(-1, keepdim=True) + g_tail
    inside = g[:, :-1] - mine[:, :-1].exp() * total
    rate = torch.where(free > 0, g_tail * (-tail).exp(), torch.zeros_like(tail))
    p.exp_().mul_((rate - total) * up).scatter_(-1, ids, inside * up)
    return value
