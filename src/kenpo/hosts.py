"""For trainers that call Kenpo: can they feed an algorithm, and a batch from advantages and counts of their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from kenpo.algorithm import Algorithm
from kenpo.errors import InputError, MissingFieldError, ScopeError, unknown_name
from kenpo.ops import groups, masked
from kenpo.order import main_reaches
from kenpo.stages.base import Regularizer, Scope, Stage, reads_policy, snake
from kenpo.types import Batch, Prepared, Rollouts, Totals

_ALWAYS = frozenset({"mask", "group", "rewards"})
_COUNTS = tuple(Totals.__dataclass_fields__)


def feeds(
    a: Algorithm,
    supplied: Collection[str],
    scope: Scope = Scope.BATCH,
    counts: Collection[str] | None = None,
    *,
    updates: int = 1,
    advantages: bool = False,
) -> str | None:
    """Why a host can't feed the algorithm exactly, or None: it can. The reason names the stage.

    `supplied`: fields of `Rollouts` and `Policy` that it gives (``mask``, ``group``, ``rewards`` go without saying).
    `scope`: the widest unit that it shows whole, with the policy's terms, when the loss is evaluated: ``SEQUENCE`` for
    a loss function called per microbatch, ``GROUP`` for microbatches of whole groups, ``BATCH`` for whole minibatches
    (two phases). `counts`: the fields of `Totals` that it knows globally (None: all). `updates`: optimizer steps per
    rollout batch; with one, ``logp_old`` need not be supplied unless `prepare` reads it. `advantages`: the host brings
    its own, so that selection, shaping and advantage don't run here.

    >>> import kenpo
    >>> kenpo.feeds(kenpo.get("grpo"), {"logp", "logp_old"})
    "kl_to_reference reads 'logp_ref', which is not supplied"
    >>> kenpo.feeds(kenpo.get("gspo"), {"logp", "logp_old"}, kenpo.Scope.SEQUENCE, {"tokens", "sequences"})
    """
    if a.updates is not None and updates > a.updates:
        return f"{a.name} takes at most {a.updates} update(s) per rollout batch, not {updates}"
    given = _ALWAYS | frozenset(supplied)
    late: tuple[Stage, ...] = (*a.weights, *a.live, a.aggregate)
    if advantages and a.selection:
        return f"{snake(a.selection[0])} drops rollouts, which the host's advantages and counts can't take back"
    if updates <= 1 and "logp" in given and (advantages or "logp_old" not in a.prepare_needs):
        given = given | {"logp_old"}  # one update: it is the policy's own log-prob
    for stage in late if advantages else a.stages:
        if missing := sorted(stage.needs - given - {"returns"}):
            return f"{snake(stage)} reads {missing[0]!r}, which is not supplied"
    if missing := sorted(main_reaches(a) - given):
        return f"{snake(a.ratio or a.surrogate)} reads {missing[0]!r}, which is not supplied"
    return _unseen(a, scope, advantages) or (None if counts is None else _uncounted(a, frozenset(counts)))


def _unseen(a: Algorithm, scope: Scope, advantages: bool) -> str | None:
    """The first stage that must see more of the batch under the current policy than `scope`."""
    weights = [s for s in a.weights if scope < Scope.BATCH or reads_policy(s, True)]
    late: list[Stage] = [*weights, *a.live]
    if a.advantage.policy_needs and not advantages:
        if scope < Scope.BATCH:
            return f"{snake(a.advantage)} needs the policy's terms of the whole minibatch before advantages are known"
        late.append(a.advantage)
    for stage in late:
        if scope < stage.span <= Scope.BATCH:
            return f"{snake(stage)} must see the whole {stage.span.name.lower()}, the host shows a {scope.name.lower()}"
    if a.aggregate.counts_kept and scope < Scope.BATCH and any(reads_policy(s, True) for s in a.weights):
        return f"{snake(a.aggregate)} counts kept tokens, which are known per microbatch only"
    return None


def _uncounted(a: Algorithm, known: frozenset[str]) -> str | None:
    """The first stage whose denominator is not among the `known` counts."""
    for stage in a.regularizers:
        if type(stage).rows is not Regularizer.rows:
            return f"{snake(stage)} names rows of its own, whose counts are not known"
    for aggregate in (a.aggregate, *(r.own_aggregate for r in a.regularizers)):
        if aggregate is not None and (missing := sorted(aggregate.totals - known)):
            return f"{snake(aggregate)} divides by the total {missing[0]!r}, which is not known"
    return None


def given(
    a: Algorithm,
    rollouts: Rollouts,
    advantages: Tensor,
    totals: Mapping[str, float | Tensor | None],
    *,
    whole_groups: bool = False,
) -> Batch:
    """A batch for `objective` from a host's own advantages [B,T] and global counts: no `prepare`, no `weigh`.

    `rollouts` are the rows of one microbatch, all of them taking part; `totals` the counts of the whole minibatch by
    their names in `Totals` (per-group counts [B]); one that is missing, None or NaN is unknown. `whole_groups`: the
    rows hold whole groups. Masked advantages are 0. Weights run with the microbatch's own policy terms.

    Raises `MissingFieldError` for an unknown total that a denominator needs, by name; `ScopeError` for a stage that
    must see more than these rows; `UnknownNameError` for a name that is no total; `InputError` for another shape.
    """
    for name in totals:
        if name not in _COUNTS:
            raise unknown_name("total", name, _COUNTS)
    if advantages.shape != rollouts.mask.shape:
        raise InputError(f"advantages have shape {list(advantages.shape)}, the mask {list(rollouts.mask.shape)}")
    scope = Scope.GROUP if whole_groups else Scope.SEQUENCE
    if reason := _unseen(a, scope, True):
        raise ScopeError(f"{a.name}: {reason}")
    like = advantages.detach()
    found = {n: _count(n, totals.get(n), like) for n in _COUNTS}
    known = frozenset(n for n, v in found.items() if not bool(v.isnan().any()))
    if reason := _uncounted(a, known):
        raise MissingFieldError(f"{a.name}: {reason}; give it in totals")
    everyone = torch.ones_like(rollouts.mask.any(-1))
    value = masked.select(like, rollouts.mask)
    size = groups.group_count(rollouts.group, everyone, like)
    prepared = Prepared(rollouts, value, everyone, rollouts.rewards, size)
    return Batch(prepared, value, None, tuple(range(len(a.weights))), Totals(**found), whole=False)


def _count(name: str, value: float | Tensor | None, like: Tensor) -> Tensor:
    """`value` as `Totals` holds it: 0-d, or [B] for a count by group; NaN where it is unknown."""
    count = torch.as_tensor(math.nan if value is None else value, dtype=like.dtype, device=like.device)
    return count.expand(len(like)) if name.startswith("group_") else count
