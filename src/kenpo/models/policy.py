"""The policy's log-probs and entropies of a batch of rollouts, with or without gradient.

The rows are compacted before the model sees them: the real tokens of each row move to the left in their order and
whatever is left over at the right is never attended to by a causal model. So positions count real tokens only, left
and right padding give the same arithmetic, and no attention mask is needed. The head runs only at positions that
predict a trainable token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError, MissingFieldError
from kenpo.models import packing as packed_rows
from kenpo.models import shared_prompt
from kenpo.models.checkpointing import checkpointed
from kenpo.models.head import Head, Reference, find_head, head_terms, module_inputs, pick_terms
from kenpo.models.loading import context_length, vocabulary_size
from kenpo.models.lora import Starting
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS, Policy, Rollouts

COMPUTED = frozenset({"logp", "entropy", "topk_logp", "kl_ref"})


def policy_terms(
    model: Any,
    rollouts: Rollouts,
    *,
    temperature: float,
    want: frozenset[str] = frozenset(),
    reference: Any = None,
    packing: str = "auto",
) -> Policy:
    """Log-probs (and entropies) of the rollouts' trainable tokens under `model` at `temperature`.

    ``rollouts.tokens`` [B,T] holds -1 where there is no token, anywhere in the row. Returns a `Policy` aligned with it:
    ``logp`` [B,T] in nats, if wanted ``entropy`` [B,T], ``topk_logp`` [B,T,K] at ``rollouts.topk_ids`` and ``kl_ref``
    [B,T], the full-vocabulary KL(π_θ‖`reference`), all with gradient; 0 off the mask. ``rollouts.support_ids``
    [B,T,K], if present, are the ids that top-k or top-p sampling kept: all terms are then those of the distribution
    renormalised over them (a position with none keeps the vocabulary).
    Names in ``want`` that are fields of `Rollouts` are left to whoever fills them. ``packing`` ("auto", "on", "off")
    lays rows end to end instead of padding them, see `kenpo.models.packing`.

    Runs in eval mode (a model in training mode is switched). Logits are raised to float32 before the temperature,
    float64 stays. Call it under ``torch.no_grad()`` for old and reference log-probs. A batch with no trainable token
    gives zeros that carry an empty graph. Raises `InputError` for a trainable position without token or predecessor,
    for ids outside the vocabulary, rows longer than the context, a sampled token outside its support, and a field in
    ``want`` that is not computed here.
    """
    made = forward(model, rollouts, temperature=temperature, want=want, reference=reference, packing=packing)
    if made is None:
        return nothing(model, rollouts, want)
    return terms_of(made, rollouts, temperature, want)


class Forward(NamedTuple):
    """One pass through the model up to the head: hidden states [N,H] and the head, or logits [N,V] and None."""

    rows: Compact
    states: Tensor
    head: Head | None
    support: Tensor | None  # [N,K]
    topk: Tensor | None  # [N,K]
    reference: Reference | None


def forward(
    model: Any,
    rollouts: Rollouts,
    *,
    temperature: float,
    want: frozenset[str],
    reference: Any = None,
    packing: str = "auto",
) -> Forward | None:
    """Everything that comes before the head, checked as `policy_terms` says; None without a trainable token."""
    if isinstance(model, Starting):
        with model.active() as inner:
            return forward(inner, rollouts, temperature=temperature, want=want, reference=reference, packing=packing)
    _check_want(want, rollouts, reference)
    if not temperature > 0:
        raise InputError(f"temperature: {temperature} is not above 0")
    if rollouts.tokens is None:
        raise MissingFieldError("tokens: the batch holds none, so the model can't score it")
    if model.training:
        model.eval()
    rows = _compact(rollouts, _device_of(model), context_length(model), vocabulary_size(model))
    if rows is None:
        return None
    with checkpointed(model):
        states, head = _hidden(model, rows, packing)
    where = (rows.row, rows.column)
    support = None if rollouts.support_ids is None else rollouts.support_ids.to(states.device)[where]
    topk = rollouts.topk_ids.to(states.device)[where] if "topk_logp" in want else None  # type: ignore[union-attr]
    other = None
    if "kl_ref" in want:
        if getattr(reference, "training", False):
            reference.eval()
        with torch.no_grad():
            other = Reference(*_hidden_of(reference, rows, packing))
    return Forward(rows, states, head, support, topk, other)


def terms_of(made: Forward, rollouts: Rollouts, temperature: float, want: frozenset[str]) -> Policy:
    """The head's terms at the places of their tokens, with graph."""
    rest = (made.rows.target, temperature, want, made.support, made.topk)
    if made.head is None:
        terms = pick_terms(made.states, *rest, None if made.reference is None else made.reference.logits)
    else:
        terms = head_terms(made.states, made.head, *rest, made.reference)
    where, shape = (made.rows.row, made.rows.column), rollouts.mask.shape
    return Policy(**{n: v.new_zeros((*shape, *v.shape[1:])).index_put(where, v) for n, v in terms.items()})


class Compact(NamedTuple):
    """Rows with trainable tokens, moved to the left; ``row``, ``column`` [N] are places in the batch as given."""

    ids: Tensor  # [R,W] inputs
    row: Tensor  # [N]
    column: Tensor  # [N]
    source_row: Tensor  # [N] row of `ids`
    source: Tensor  # [N] position in `ids` whose output predicts the target
    target: Tensor  # [N]


def _check_want(want: frozenset[str], rollouts: Rollouts, reference: Any) -> None:
    for name in sorted(want - COMPUTED):
        if name in POLICY_FIELDS:
            raise InputError(f"{name}: this forward pass computes only {', '.join(sorted(COMPUTED))}")
        if name not in ROLLOUT_FIELDS:
            raise InputError(f"{name}: no field of Policy or Rollouts")
    if "topk_logp" in want and rollouts.topk_ids is None:
        raise MissingFieldError("topk_logp needs topk_ids in the rollouts, and the batch holds none")
    if "kl_ref" in want and reference is None:
        raise MissingFieldError("kl_ref needs a reference model to compare with")


def _compact(rollouts: Rollouts, device: torch.device, context: int | None, vocabulary: int) -> Compact | None:
    assert rollouts.tokens is not None
    tokens, mask = rollouts.tokens.to(device), rollouts.mask.to(device)
    row, column = mask.nonzero(as_tuple=True)
    if row.numel() == 0:
        return None
    present = tokens >= 0
    place = present.cumsum(1) - 1  # position among the row's real tokens
    target, source = tokens[row, column], place[row, column] - 1
    bad = (target < 0) | (source < 0)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        r, c = int(row[at]), int(column[at])
        why = "holds no token" if int(target[at]) < 0 else "is the row's first token, so nothing predicts it"
        raise InputError(f"tokens: row {r} position {c} is trainable but {why}")
    kept = mask.any(1)
    width = int(source.max()) + 1  # inputs after the last prediction are never read
    if context is not None and width > context:
        raise InputError(f"tokens: a row of {width} tokens exceeds the model's context of {context}")
    for name, ids in (("tokens", tokens), ("topk_ids", rollouts.topk_ids)):
        if ids is not None and ids.numel() and int(ids.max()) >= vocabulary:
            raise InputError(f"{name}: id {int(ids.max())} is outside the model's vocabulary of {vocabulary}")
    index = kept.cumsum(0) - 1
    ids = tokens.new_zeros((int(kept.sum()), width))
    used_row, used_column = (present & kept[:, None] & (place < width)).nonzero(as_tuple=True)
    ids[index[used_row], place[used_row, used_column]] = tokens[used_row, used_column]
    return Compact(ids, row, column, index[row], source, target)


def _hidden_of(reference: Any, rows: Compact, packing: str) -> tuple[Tensor, Head | None]:
    if not isinstance(reference, Starting):
        return _hidden(reference, rows, packing)
    with reference.active() as model:
        return _hidden(model, rows, packing)


def _hidden(model: Any, rows: Compact, packing: str) -> tuple[Tensor, Head | None]:
    """What predicts the targets: hidden states [N,H] and the head, or the model's own logits [N,V] and None."""
    head = find_head(model)
    module = model if head is None else head.decoder
    packed = packed_rows.why_padded(model, module, packing) is None
    last = rows.source.new_zeros(len(rows.ids)).scatter_reduce(0, rows.source_row, rows.source, "amax")
    first = last.scatter_reduce(0, rows.source_row, rows.source, "amin")
    lengths = (last + 1).tolist()
    families = _families(model, module, rows.ids, first.tolist(), lengths)
    if not families:
        states, start = _unshared(module, rows.ids, lengths, packed)
        return states[start[rows.source_row] + rows.source], head
    shared = shared_prompt.run(module, rows.ids, lengths, families)
    # Where a row's output stands in the states of all passes laid end to end, as if it began at position 0.
    size, width = shared.states.shape[:2]
    start = rows.source.new_zeros(len(rows.ids))
    start[shared.rows] = torch.arange(size, device=start.device) * width - shared.offset
    states = shared.states.flatten(0, 1)
    alone = torch.ones_like(start).index_fill(0, shared.rows, 0).nonzero().squeeze(1)
    if len(alone):
        wide = [lengths[r] for r in alone.tolist()]
        rest, begin = _unshared(module, rows.ids[alone, : max(wide)], wide, packed)
        start[alone] = len(states) + begin
        states = torch.cat([states, rest])
    return states[start[rows.source_row] + rows.source], head


def _unshared(module: Any, ids: Tensor, lengths: list[int], packed: bool) -> tuple[Tensor, Tensor]:
    """Output states [M,H] of rows that each run whole, and where each row starts in them."""
    if packed and len(lengths) > 1:
        return packed_rows.run(module, ids, lengths)
    states = _states(module, ids)
    return states.flatten(0, 1), torch.arange(len(ids), device=ids.device) * ids.shape[1]


def _families(model: Any, module: Any, ids: Tensor, first: list[int], lengths: list[int]) -> list[shared_prompt.Family]:
    """Rows whose prompt is to run once. Rows of one prompt are told by its tokens; its last one stays with the row."""
    table = ids.cpu().numpy()
    prefixes = [table[r, : first[r] + 1].tobytes() for r in range(len(table))]
    families, saved = shared_prompt.families(prefixes, first, lengths)
    if saved < shared_prompt.LEAST_TOKENS:
        return []
    reason = shared_prompt.reason_against(model, module)
    if reason is not None:
        shared_prompt.warn_once(model, reason)
        return []
    return families


def shares_prompts(model: Any) -> str | None:
    """None where prompts that rows share run once, with gradients as they are switched now; else the reason."""
    if isinstance(model, Starting):
        model = model.model
    head = find_head(model)
    return shared_prompt.reason_against(model, model if head is None else head.decoder)


def pads_rows(model: Any, packing: str) -> str | None:
    """None where rows that share no prompt are packed, else why not. InputError where ``packing="on"`` can't be."""
    if isinstance(model, Starting):
        model = model.model
    head = find_head(model)
    return packed_rows.why_padded(model, model if head is None else head.decoder, packing)


def _states(module: Any, ids: Tensor) -> Tensor:
    out = module(**module_inputs(module, ids))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def nothing(model: Any, rollouts: Rollouts, want: frozenset[str]) -> Policy:
    """Zeros with a graph to the model's parameters (gradients exactly 0), so that a backward pass goes through."""
    anchor = next((p for p in model.parameters() if p.requires_grad), next(model.parameters()))
    dtype = torch.float64 if anchor.dtype == torch.float64 else torch.float32
    zero = anchor.reshape(-1)[:0].sum().to(dtype)
    made = {n: zero.expand(rollouts.mask.shape) for n in ("logp", *({"entropy", "kl_ref"} & want))}
    if "topk_logp" in want:
        made["topk_logp"] = zero.expand(rollouts.topk_ids.shape)  # type: ignore[union-attr]
    return Policy(**made)


def _device_of(model: Any) -> torch.device:
    return next(model.parameters()).device
