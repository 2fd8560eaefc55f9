"""Divergences between a student's and a teacher's whole distribution at a position, from logits or log-probs.

p is the student, q the teacher (a constant). Axes: V vocabulary, K buckets. `kenpo.ops.linear_divergence` gives the
same numbers from hidden states and two heads, without holding the logits of a batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kenpo.divergence import Divergence
from kenpo.errors import InputError

#: A tail bucket holds at least this much; below, its log is held and has no gradient.
LEAST_TAIL = 1e-7


def divergence(logits: Tensor, teacher: Tensor, spec: Divergence | None = None, temperature: float = 1.0) -> Tensor:
    """[..., V] two rows of logits -> [...] D in nats, with a gradient to `logits` alone.

    Both are divided by `temperature` > 0 first (another temperature for the teacher biases every gap: scale its logits
    yourself if you mean it); nothing is multiplied by T². Logits are finite; half precision is raised to float32.

    >>> p, q = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    >>> [round(float(divergence(p, q, Divergence(k))), 6) for k in ("forward", "reverse", "jsd")]
    [0.429813, 0.445846, 0.105297]
    """
    spec = spec or Divergence()
    if not temperature > 0:
        raise InputError(f"temperature: must be positive, got {temperature}")
    if logits.shape[-1] != teacher.shape[-1]:
        raise InputError(
            f"a teacher over {teacher.shape[-1]} entries, a student over {logits.shape[-1]}: no divergence"
        )
    low = logits.dtype in (torch.bfloat16, torch.float16)
    x, y = (logits.float(), teacher.float()) if low else (logits, teacher.to(logits.dtype))
    p, q = (x / temperature).log_softmax(-1), (y.detach() / temperature).log_softmax(-1)
    if spec.top is not None and spec.top < p.shape[-1]:
        p, q = on_support(p, q, spec)
    return between(p, q, spec)


def on_support(p: Tensor, q: Tensor, spec: Divergence) -> tuple[Tensor, Tensor]:
    """[..., V] log-probs -> [..., K] (or K+1 with a tail) log-masses of the support's buckets, with gradients."""
    ids = support(p, q, spec)
    inside = [x.gather(-1, ids) for x in (p, q)]
    if spec.rest == "renormalised":
        return inside[0].log_softmax(-1), inside[1].log_softmax(-1)
    if spec.rest == "generalised":
        return inside[0], inside[1]
    tails = [x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) for x in (p, q)]
    tails = [t.clamp(min=math.log(LEAST_TAIL)) for t in tails]
    return torch.cat([inside[0], tails[0]], -1), torch.cat([inside[1], tails[1]], -1)


def support(p: Tensor, q: Tensor, spec: Divergence) -> Tensor:
    """[..., K] ids of the owner's likeliest tokens."""
    assert spec.top is not None
    return (p if spec.owner == "student" else q).detach().topk(spec.top, -1).indices


def between(p: Tensor, q: Tensor, spec: Divergence) -> Tensor:
    """[..., K] log-masses of the same buckets -> [...] their divergence; for masses below 1, the generalised one."""
    surplus = p.exp() - q.exp() if spec.top is not None and spec.rest == "generalised" else None
    if spec.direction == "forward":
        summands = q.exp() * (q - p)
        summands = summands if spec.clip is None else summands.clamp(max=spec.clip)
        return (summands if surplus is None else summands + surplus).sum(-1)
    if spec.direction == "reverse":
        summands = p.exp() * (p - q)
        return (summands if surplus is None else summands - surplus).sum(-1)
    m = mixture(p, q, spec.weight)
    return (spec.weight * q.exp() * (q - m) + (1 - spec.weight) * p.exp() * (p - m)).sum(-1)


def mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """``log(share·q + (1−share)·p)`` from log-probs; at share 0 and 1 exactly one of them.

    With sampled tokens' log-probs this is MiniLLM's sampler, share its alpha (arXiv:2306.08543).
    """
    if share in (0.0, 1.0):
        return q if share else p
    return torch.logaddexp(q + math.log(share), p + math.log1p(-share))


def slopes(p: Tensor, q: Tensor, spec: Divergence) -> tuple[Tensor, Tensor]:
    """([...] D, [..., K] G) of log-masses: ``dD/dx_v = G_v − p_v·ΣG`` for the logits x of the buckets; constants.

    Forward: G = −q. Reverse: p·log(p/q). JSD: (1−b)·p·log(p/m). Generalised forward: p − q.
    """
    value = between(p, q, spec)
    if spec.direction == "forward":
        g = q.exp().neg_()
        if spec.top is not None and spec.rest == "generalised":
            g = g + p.exp()
        if spec.clip is not None:
            g = torch.where(q.exp() * (q - p) < spec.clip, g, g.new_zeros(()))
        return value, g
    if spec.direction == "reverse":
        return value, p.exp() * (p - q)
    return value, (1 - spec.weight) * p.exp() * (p - mixture(p, q, spec.weight))


def trust_region(base: Tensor, teacher: Tensor, mix: float) -> Tensor:
    """``base + mix·(teacher − base)`` of logits: a teacher held near `base` (SDPO, arXiv:2601.20802; mix .05 there)."""
    if not 0 <= mix <= 1:
        raise InputError(f"mix: {mix} must lie in [0, 1]")
    return base + mix * (teacher - base)
