"""From hidden states to log-probs: the model's head, proven once against the model's own logits.

Some families change the head's output (a soft cap, a logit scale). `find_head` reads these from the configuration and
tries decoder, head and changes on a probe; where they don't give the model's own logits, the caller uses those.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError
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
        entropy="entropy" in want, ids=topk, second=against,
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
    outside = None if support is None else _outside(x, support, targets)
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
        if not bool(outside.any()):
            return (logp.exp() * (logp - other.log_softmax(-1))).sum(-1)
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


def _outside(x: Tensor, support: Tensor, targets: Tensor) -> Tensor:
    """Mask [N,V] of ids outside the support; a row whose support is empty keeps the whole vocabulary."""
    real = support >= 0
    free = ~real.any(-1)
    strange = ~free & ~(support == targets[:, None]).any(-1)
    if bool(strange.any()):
        at = int(strange.nonzero()[0])
        raise InputError(
            f"support_ids: trained token {int(targets[at])} (the {at + 1}. of the microbatch) is outside the ids that "
            "sampling kept there; it was not sampled with these top-k / top-p options"
        )
    rows = torch.arange(len(x), device=x.device)[:, None].expand_as(support)
    inside = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    inside[rows[real], support[real]] = True
    return ~(inside | free[:, None])


def module_inputs(module: Any, ids: Tensor) -> dict[str, Any]:
    """Arguments for a plain forward over left-aligned ids: positions count from 0, no cache."""
    accepted = accepted_arguments(module)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def accepted_arguments(module: Any) -> frozenset[str]:
    """Names of the arguments of a module's forward, looked up through decorators and adapters.

    Where it takes any keyword, ``use_cache`` counts as accepted: some families read it from there only.
    """
    parameters = inspect.signature(_base(module).forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | ({"use_cache"} if anything else frozenset())


_heads: weakref.WeakKeyDictionary[Any, list[Head | None]] = weakref.WeakKeyDictionary()


def find_head(model: Any) -> Head | None:
    """The model's decoder and head, or None where they don't reproduce its own logits. Proven once per model and head.

    The proof runs outside autocast, whose cache would keep weights cast without a graph.
    """
    known = _heads.get(model)
    if known is None or (known[0] is not None and known[0].module is not _base(model).get_output_embeddings()):
        candidate = _candidate(model)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            known = [candidate if candidate is not None and _proven(model, candidate) else None]
        _heads[model] = known
    return known[0]


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _candidate(model: Any) -> Head | None:
    inner = _base(model)
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


@torch.no_grad()
def _proven(model: Any, head: Head) -> bool:
    """Whether decoder and head give the model's logits, for hidden states as they are and for much larger ones.

    A fresh model's logits are small, where a soft cap hardly shows; so states are scaled on their way into the head.
    """
    device = head.module.weight.device
    size = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(1, 13, device=device) * 7919 % size).reshape(2, 6)
    was_training = model.training
    model.eval()
    try:
        plain = head.decoder(**module_inputs(head.decoder, ids)).last_hidden_state
        reach = head.module(plain).float().abs().max().clamp_min(1e-6)
        return all(_agrees(model, head, ids, plain, factor) for factor in (1.0, float(100.0 / reach)))
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):
        return False
    finally:
        model.train(was_training)


def _agrees(model: Any, head: Head, ids: Tensor, plain: Tensor, factor: float) -> bool:
    seen: list[Tensor] = []

    def scale_up(_module: Any, args: tuple) -> tuple:
        seen.append(args[0])
        return (args[0] * factor, *args[1:])

    hook = head.module.register_forward_pre_hook(scale_up)
    try:
        own = model(**module_inputs(model, ids)).logits
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape != plain.shape:
        return False
    ours = head.logits(plain * factor)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(own.dtype, 2e-2)
    same = ours.shape == own.shape
    return same and bool((ours.double() - own.double()).abs().max() <= tolerance * own.double().abs().max())
