"""From hidden states to log-probs: the model's head, proven once against the model's own logits.

Some families change the head's output (a soft cap, a logit scale). `find_head` reads these from the configuration and
tries decoder, head and changes on a probe; where they don't give the model's own logits, the caller uses those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.models.passes import base_of, call
from kenpo.models.trial import disagreement, probe_ids, reason_by_trial
from kenpo.models.wide_head import WideHead
from kenpo.ops.linear_logprob import Second, Transform, linear_logprob

#: Up to so many logits (positions times vocabulary) they are simply made. Measured on a CPU, hidden sizes 192 and 512:
#: the tiled path's one more matrix product costs up to a quarter more time at a million logits, about none at four
#: million, and saves time from there on.
FEW_LOGITS = 2**22


@dataclass(frozen=True, eq=False)
class Head:
    """``logits = cap · tanh(module(hidden) · scale / cap)``, or ``module(hidden) · scale``, in the module's dtype.

    ``decoder`` gives the hidden states; ``module`` is the output embedding (a Linear, maybe with an adapter).
    """

    decoder: Any
    module: Any
    scale: float | None = None
    divide: bool = False
    cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], rounded as the model itself rounds them."""
        x = self.module(hidden)
        if self.scale is not None:
            x = x / self.scale if self.divide else x * self.scale
        if self.cap is not None:
            x = torch.tanh(x / self.cap) * self.cap
        return x

    def linear(self) -> tuple[Tensor, Tensor | None, Transform] | None:
        """Weight, bias and what follows (at temperature 1) where the module is a bare Linear; None where an adapter, a
        parametrization or a hook may change what it does."""
        m = self.module
        if (
            type(m) not in (torch.nn.Linear, WideHead)
            or m._forward_hooks
            or m._forward_pre_hooks
            or "forward" in vars(m)
        ):
            return None
        scale = None if self.scale is None else 1.0 / self.scale if self.divide else self.scale
        return m.weight, m.bias, Transform(1.0, scale, self.cap)


class Reference(NamedTuple):
    """What a second model says about the same predictions: hidden states [N,H] and head, or logits [N,V] and None."""

    states: Tensor
    head: Head | None

    @property
    def logits(self) -> Tensor:
        """Its logits [N,V]."""
        return self.states if self.head is None else self.head.logits(self.states)

    @property
    def width(self) -> int:
        """Entries of its vocabulary."""
        return int(self.states.shape[-1] if self.head is None else self.head.module.weight.shape[0])


def head_terms(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    want: frozenset[str],
    support: Tensor | None = None,
    topk: Tensor | None = None,
    reference: Reference | None = None,
) -> dict[str, Tensor]:
    """Terms of N predictions from hidden states [N,H]: ``logp`` [N], if wanted ``entropy`` [N], ``topk_logp`` [N,K],
    ``kl_ref`` [N].

    Where the head is a bare Linear, logits exist one tile of the vocabulary at a time (`linear_logprob`). They are made
    whole where that is faster (up to `FEW_LOGITS`), under a ``support``, and for a head with an adapter.
    """
    linear = head.linear()
    second = None if reference is None or reference.head is None else reference.head.linear()
    few = len(hidden) * head.module.weight.shape[0] <= FEW_LOGITS
    if reference is not None and reference.width != head.module.weight.shape[0]:
        raise InputError(
            f"kl_ref: the reference's vocabulary has {reference.width} entries, the model's "
            f"{head.module.weight.shape[0]}; a KL needs the same one"
        )
    if linear is None or few or support is not None or (reference is not None and second is None):
        other = None if reference is None else reference.logits
        return pick_terms(head.logits(hidden), targets, temperature, want, support, topk, other)
    weight, bias, after = linear
    against = None
    if reference is not None and second is not None:
        w, b, then = second
        against = Second(reference.states, w, b, then._replace(temperature=temperature))
    terms = linear_logprob(
        hidden, weight, targets, bias=bias, transform=after._replace(temperature=temperature),
        entropy="entropy" in want, ids=topk, second=against, checked=True,
    )  # fmt: skip
    named = {"logp": terms.logp, "entropy": terms.entropy, "topk_logp": terms.ids_logp, "kl_ref": terms.kl}
    return {n: v for n, v in named.items() if v is not None}


def pick_terms(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    want: frozenset[str],
    support: Tensor | None = None,
    topk: Tensor | None = None,
    reference: Tensor | None = None,
) -> dict[str, Tensor]:
    """The terms of `head_terms` from logits [N,V] and the reference's. ``support`` [N,K], -1 padded, restricts both."""
    x = tempered(logits, temperature)
    chosen = x.gather(-1, targets[:, None]).squeeze(-1)
    outside = None if support is None else _outside(x, support)
    if outside is not None:
        x = x.masked_fill(outside, -torch.inf)
    terms = {}
    if "entropy" in want or reference is not None:
        logp = x.log_softmax(-1)
        if "entropy" in want:
            terms["entropy"] = entropy_of(logp)
        if reference is not None:
            terms["kl_ref"] = _divergence(logp, tempered(reference, temperature), outside)
        norm = None
        terms["logp"] = logp.gather(-1, targets[:, None]).squeeze(-1)
    else:
        norm = x.logsumexp(-1)
        terms["logp"] = chosen - norm
    if topk is not None:
        norm = x.logsumexp(-1) if norm is None else norm
        values = x.gather(-1, topk.clamp_min(0)) - norm[:, None]
        terms["topk_logp"] = values.masked_fill(topk < 0, 0.0)
    return terms


def _divergence(logp: Tensor, other: Tensor, outside: Tensor | None) -> Tensor:
    """KL [N] of log-probs [N,V] from the softmax of `other`, both over the same support."""
    if outside is None:
        outside = logp == -torch.inf  # ids that are never sampled, by a bias of -inf
        logq = other.log_softmax(-1)
    else:
        logq = other.masked_fill(outside, -torch.inf).log_softmax(-1)
    gap = logp.masked_fill(outside, 0.0) - logq.masked_fill(outside, 0.0)
    return (logp.masked_fill(outside, 0.0).exp() * gap).masked_fill(outside, 0.0).sum(-1)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits over the temperature in float32 (float64 stays). Sampler and trainer both use this."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x if temperature == 1.0 else x / temperature


def entropy_of(logp: Tensor) -> Tensor:
    """Entropy [...] in nats of log-probs [..., V]; entries of -inf contribute 0, value and gradient."""
    zero = logp == -torch.inf
    finite = logp.masked_fill(zero, 0.0)
    return -(finite.exp() * finite).sum(-1)


def _outside(x: Tensor, support: Tensor) -> Tensor:
    """Mask [N,V] of ids outside the support; a row whose support is empty keeps the whole vocabulary."""
    real, size = support >= 0, x.shape[-1]
    inside = torch.zeros((len(x), size + 1), dtype=torch.bool, device=x.device)
    inside.scatter_(1, torch.where(real, support, size), True)
    return ~(inside[:, :size] | ~real.any(-1, keepdim=True))


def find_head(model: Any) -> Head | None:
    """The model's decoder and head, or None where they don't reproduce its own logits. Tried, not believed."""
    candidate = _candidate(model)
    if candidate is None or reason_by_trial(model, lambda: _fault(model, candidate)) is not None:
        return None
    return candidate


def _candidate(model: Any) -> Head | None:
    inner = base_of(model)
    decoder, module = inner.base_model, inner.get_output_embeddings()
    if module is None or decoder is inner:
        return None
    config = inner.config.get_text_config(decoder=True)
    scale, divide = None, False
    for name, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value != 1:
            scale, divide = float(value), inverse
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(decoder, module, scale, divide, float(cap) if cap else None)


def _fault(model: Any, head: Head) -> str | None:
    """Why decoder and head don't give the model's logits, for hidden states as they are and for much larger ones.

    A fresh model's logits are small, where a soft cap hardly shows; so states are scaled on their way into the head.
    """
    ids = probe_ids(model, 2, 6)
    plain = call(head.decoder, ids)
    reach = head.module(plain).float().abs().max().clamp_min(1e-6)
    for factor in (1.0, float(100.0 / reach)):
        if (reason := _compare(model, head, ids, plain, factor)) is not None:
            return reason
    return None


def _compare(model: Any, head: Head, ids: Tensor, plain: Tensor, factor: float) -> str | None:
    seen: list[Tensor] = []

    def scale_up(_module: Any, args: tuple) -> tuple:
        seen.append(args[0])
        return (args[0] * factor, *args[1:])

    hook = head.module.register_forward_pre_hook(scale_up)
    try:
        own = call(model, ids)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape != plain.shape:
        return "its head does not run once on the decoder's states"
    ours = head.logits(plain * factor)
    return "logits of another shape" if ours.shape != own.shape else disagreement(ours, own, own, whole_pass=False)
