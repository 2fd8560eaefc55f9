"""A teacher beside the policy: what it would have said on the policy's tokens, as one divergence per token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kenpo.divergence import Term
from kenpo.errors import InputError
from kenpo.models.head import FEW_LOGITS, Head, Reference
from kenpo.ops.linear_divergence import linear_divergence
from kenpo.ops.linear_logprob import Second
from kenpo.ops.vocabulary import divergence


def teacher_terms(states: Tensor, head: Head | None, teacher: Reference, term: Term) -> Tensor:
    """[N] the term's divergence of the policy's distribution from the teacher's, with a gradient to the policy alone.

    ``states`` [N,H] and head, or logits [N,V] and None. Both models' logits are divided by ``term.temperature``, which
    is the stage's own, not the sampler's. Where both heads are bare Linears and the logits many, they exist a chunk at
    a time (`linear_divergence`). Raises `InputError` for vocabularies of different sizes.
    """
    width = states.shape[-1] if head is None else head.module.weight.shape[0]
    if teacher.width != width:
        raise InputError(
            f"{term.name}: the teacher's vocabulary has {teacher.width} entries, the policy's {width}; a divergence "
            "needs the same one"
        )
    own = None if head is None else head.linear()
    other = None if teacher.head is None else teacher.head.linear()
    if own is None or other is None or len(states) * width <= FEW_LOGITS:
        logits = states if head is None else head.logits(states)
        return divergence(logits, teacher.logits, term.divergence, term.temperature)
    weight, bias, after = own
    w, b, then = other
    second = Second(
        teacher.states, w.detach(), None if b is None else b.detach(), then._replace(temperature=term.temperature)
    )
    return linear_divergence(
        states, weight, second, term.divergence, bias=bias, transform=after._replace(temperature=term.temperature)
    )


def check_vocabulary(tokenizer: Any, teacher: Any, name: str, who: str = "a teacher") -> None:
    """InputError unless both tokenizers give every text the same ids: `who` scores the policy's own tokens."""
    ours, theirs = tokenizer.get_vocab(), teacher.get_vocab()
    for text, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if theirs.get(text, number) != number or (text not in theirs and number in theirs.values()):
            raise InputError(
                f"{name}: its tokenizer gives {text!r} the id {theirs.get(text)}, the policy's {number}; {who} "
                "scores the policy's tokens, so both need the same vocabulary"
            )
    missing = len(ours.keys() - theirs.keys())
    if missing:
        raise InputError(f"{name}: its tokenizer lacks {missing} of the policy's tokens; both need the same vocabulary")
