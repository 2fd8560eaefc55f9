"""What one model pass gives: hidden states where something is to be told, and the terms that heads make of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.divergence import Term
from kenpo.models.head import Head, Reference, head_terms, pick_terms
from kenpo.models.passes import Rows
from kenpo.models.teaching import teacher_terms
from kenpo.models.value_head import SCALARS, ScalarHeads
from kenpo.types import Policy, Rollouts

#: Policy fields that come from the distribution over the vocabulary.
OF_THE_VOCABULARY = frozenset({"logp", "entropy", "topk_logp", "kl_ref", "kl_teacher", "kl_sampler"})


class Forward(NamedTuple):
    """One pass through the model up to its heads.

    ``states`` [N,H] and the vocabulary's ``head``, or logits [N,V] and None; ``ends`` [R,H] are the states of the rows'
    last trainable tokens, where a score is wanted; ``scalars`` the heads of SCALARS.
    """

    rows: Rows
    states: Tensor
    ends: Tensor | None
    head: Head | None
    scalars: ScalarHeads
    support: Tensor | None  # [N,K]
    topk: Tensor | None  # [N,K]
    reference: Reference | None
    others: Mapping[str, tuple[Reference, Term]] = MappingProxyType({})  # field -> whom it is measured against


def terms_of(made: Forward, rollouts: Rollouts, temperature: float, want: frozenset[str]) -> Policy:
    """The wanted terms at the places of their tokens, with graph; 0 elsewhere."""
    found = scalar_terms(made, made.states, made.ends, rollouts, want)
    spoken = want & OF_THE_VOCABULARY
    if spoken:
        rest = (made.rows.target, temperature, spoken, made.support, made.topk)
        if made.head is None:
            terms = pick_terms(made.states, *rest, None if made.reference is None else made.reference.logits)
        else:
            terms = head_terms(made.states, made.head, *rest, made.reference)
        terms |= {name: teacher_terms(made.states, made.head, *other) for name, other in made.others.items()}
        where, shape = (made.rows.row, made.rows.column), rollouts.mask.shape
        found |= {n: v.new_zeros((*shape, *v.shape[1:])).index_put(where, v) for n, v in terms.items() if n in spoken}
    return Policy(**found)


def scalar_terms(
    made: Forward, states: Tensor, ends: Tensor | None, rollouts: Rollouts, want: frozenset[str]
) -> dict[str, Tensor]:
    """``values`` [B,T] from `states` [N,H] and ``score`` [B] from `ends` [R,H], those that are wanted, with graph."""
    found = {}
    if "values" in want:
        v = made.scalars["values"](states)
        found["values"] = v.new_zeros(rollouts.mask.shape).index_put((made.rows.row, made.rows.column), v)
    if "score" in want:
        assert ends is not None
        v = made.scalars["score"](ends)
        found["score"] = v.new_zeros(len(rollouts)).index_put((made.rows.batch_row,), v)
    return found


def nothing(anchor: Tensor, rollouts: Rollouts, want: frozenset[str]) -> Policy:
    """Zeros with a graph to `anchor` (gradient exactly 0), so that a backward pass goes through."""
    dtype = torch.float64 if anchor.dtype == torch.float64 else torch.float32
    zero = anchor.reshape(-1)[:0].sum().to(dtype)
    shapes: dict[str, Any] = dict.fromkeys(OF_THE_VOCABULARY | {*SCALARS}, rollouts.mask.shape)
    shapes["score"] = (len(rollouts),)
    if "topk_logp" in want:
        assert rollouts.topk_ids is not None
        shapes["topk_logp"] = rollouts.topk_ids.shape
    return Policy(**{n: zero.expand(shapes[n]) for n in sorted(want)})
