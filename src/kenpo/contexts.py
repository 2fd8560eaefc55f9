"""The same response after another prompt: rows under a named context, and terms brought back to the rows' own places.

A context (``rollouts.contexts``: name -> [B,P] ids, -1 where there is none) stands in place of all that precedes a
row's first trainable token: a hint that the policy does not see, or the prompt without the help that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kenpo.errors import MissingFieldError
from kenpo.fields import ROLLOUT_FIELDS
from kenpo.types import Rollouts

HINT = "hint"  # what a teacher is shown beside the problem


def has_context(rollouts: Rollouts, name: str) -> Tensor:
    """[B] bool: rows that have the context. `MissingFieldError` if the batch does not hold it."""
    return (_ids(rollouts, name) >= 0).any(-1)


def in_context(rollouts: Rollouts, name: str) -> Rollouts:
    """The rollouts with the context's ids in place of their prompts: P + T columns, the response where it was, P later.

    A row that lacks the context keeps its own prompt. Fields per token are widened by their padding; ``prefix`` goes,
    since it names the prompts that are left out. `MissingFieldError` if the batch does not hold the context.
    """
    ids = _ids(rollouts, name)
    changed, width = has_context(rollouts, name), ids.shape[1]
    if rollouts.tokens is None:
        raise MissingFieldError("tokens: the batch holds none, so nothing can be read in a context")
    prompt = rollouts.mask.cumsum(-1) == 0
    own = rollouts.tokens.masked_fill(changed.unsqueeze(-1) & prompt, -1)
    fields = {}
    for field, value in rollouts.tensors().items():
        spec = ROLLOUT_FIELDS[field]
        if spec.axes.startswith("BT"):
            before = value.new_full((len(value), width, *value.shape[2:]), spec.pad)
            fields[field] = torch.cat([before, value], 1)
        elif field != "prefix":
            fields[field] = value
    fields["tokens"] = torch.cat([ids.to(own), own], 1)
    return Rollouts(**fields, reward_parts=rollouts.reward_parts, contexts={})


def at_own_places(terms: Mapping[str, Tensor], rollouts: Rollouts) -> dict[str, Tensor]:
    """Terms [B,P+T,…] of `in_context`'s rows as [B,T,…]; what has one number per row stays."""
    width = rollouts.mask.shape[1]
    return {n: v[:, v.shape[1] - width :] if v.dim() > 1 else v for n, v in terms.items()}


def _ids(rollouts: Rollouts, name: str) -> Tensor:
    if name not in rollouts.contexts:
        held = ", ".join(rollouts.contexts) or "none"
        raise MissingFieldError(f"context {name!r}: the batch holds none of that name (it holds: {held})")
    return rollouts.contexts[name]
