"""Divergences between a student's and a teacher's whole distribution at a position, from logits or log-probs.

p is the student, q the teacher (a constant). Axes: V vocabulary, K buckets. `kenpo.ops.linear_divergence` gives the
same numbers from hidden states and two heads, without holding the logits of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import InputError

#: A tail bucket holds at least this much; below, its log is held and has no gradient.
LEAST_TAIL = 1e-7
#: The Jensen-Shannon weight is 0, 1 or at least this far from both: close to an end it is a learning rate.
EDGE = 0.01


@dataclass(frozen=True)
class Divergence:
    """Which divergence, on which support.

    ``kind`` "forward": KL(q‖p), covers the teacher's modes; "reverse": KL(p‖q), seeks one; "jsd": ``b KL(q‖m) + (1−b)
    KL(p‖m)``, ``m = b q + (1−b) p``, b = ``weight``, which is by definition the forward KL at b = 0 and the reverse at
    b = 1 (GKD, arXiv:2306.13649). JSD(b) itself tends to 0 at both ends, so 0 < b < .01 and .99 < b < 1 are refused.

    ``top`` K: only the K likeliest tokens of ``owner`` ("student" or "teacher") are told apart (None, or K ≥ V: all).
    ``rest``: "tail" puts the others into one bucket, a true divergence, never above the full one; "renormalised"
    compares conditional on the support; "generalised" adds Q − P (reverse) or P − Q (forward), P and Q the masses of
    the support, which keeps it ≥ 0 and its gradient that of the full sum's terms. The bare truncated sum is no
    divergence (it falls when the support is emptied) and is not offered.

    ``clip``: each summand of the forward KL is cut from above there (OPSD's code); the sum may then be negative.
    """

    kind: Literal["forward", "reverse", "jsd"] = "jsd"
    weight: float = 0.5
    top: int | None = None
    owner: Literal["student", "teacher"] = "student"
    rest: Literal["tail", "renormalised", "generalised"] = "tail"
    clip: float | None = None

    def __post_init__(self) -> None:
        known = {"kind": ("forward", "reverse", "jsd"), "owner": ("student", "teacher"),
                 "rest": ("tail", "renormalised", "generalised")}  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise InputError(f"divergence.{name}: {getattr(self, name)!r} is not one of {', '.join(values)}")
        b = self.weight
        if not (b in (0.0, 1.0) or EDGE <= b <= 1 - EDGE):
            raise InputError(
                f"divergence.weight: {b} is neither 0, 1 nor within [{EDGE}, {1 - EDGE}]; near an end the "
                "Jensen-Shannon divergence tends to 0 and the weight is a learning rate: use 0 for KL(teacher‖student) "
                "or 1 for KL(student‖teacher)"
            )
        if self.top is not None and self.top < 1:
            raise InputError(f"divergence.top: {self.top} tokens; give at least 1, or None for the whole vocabulary")
        if self.clip is not None and (self.direction != "forward" or self.top is not None):
            raise InputError("divergence.clip: cuts summands of the forward KL over the whole vocabulary only")

    @property
    def direction(self) -> str:
        """`kind` with the ends of "jsd" resolved: "forward", "reverse" or "jsd"."""
        return {0.0: "forward", 1.0: "reverse"}.get(self.weight, "jsd") if self.kind == "jsd" else self.kind


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
