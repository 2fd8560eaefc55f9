"""What an algorithm and its inputs must satisfy, checked where they enter; each failure is one named error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import IllegalCombinationError, InputError, NonFiniteError, ScopeError
from kenpo.ops import groups, masked
from kenpo.stages.base import Scope, Stage, snake
from kenpo.types import Batch, Policy, Prepared, Rollouts

if TYPE_CHECKING:
    from kenpo.algorithm import Algorithm


def check_combination(a: Algorithm) -> None:
    """Refuse stages that can't stand together, when the algorithm is built. Raises `IllegalCombinationError`."""
    if a.surrogate.takes_ratio and a.ratio is None:
        raise IllegalCombinationError(f"{a.name}: {snake(a.surrogate)} takes a ratio, but the ratio slot is empty")
    if not a.surrogate.takes_ratio and a.ratio is not None:
        raise IllegalCombinationError(
            f"{a.name}: {snake(a.surrogate)} takes no ratio, but the ratio slot holds {snake(a.ratio)}"
        )
    assert a.terms is not None  # refuses two kinds of one field
    check_outcomes(a)
    check_ratios(a)
    if readers := [s for s in a.stages if "returns" in s.needs and not a.advantage.makes_returns]:
        raise IllegalCombinationError(
            f"{a.name}: {snake(readers[0])} reads returns, which {snake(a.advantage)} does not make; use an advantage "
            "that does, such as an estimate with a critic"
        )
    check_kl(a)
    corrections = [s for s in a.weights if s.is_correction]
    anchor = None if a.ratio is None else a.ratio.anchor
    if corrections and a.ratio is not None and "logp_sampler" in a.ratio.needs:  # also in a nested ratio
        raise IllegalCombinationError(
            f"{a.name}: {snake(corrections[0])} corrects π_old/μ while the ratio is already anchored at the sampler: "
            "the mismatch would be counted twice; anchor the ratio at 'old' or drop the correction"
        )
    for stage in corrections:
        proximal = stage.anchor or "old"
        if {anchor, proximal} == {"old", "prox"}:
            raise IllegalCombinationError(
                f"{a.name}: {snake(stage)} corrects π_{proximal}/μ while the ratio is anchored at {anchor!r}: their "
                "product is no ratio of π_θ to μ; give both the same anchor"
            )


def check_kl(a: Algorithm) -> None:
    """Refuse a KL to the reference in the reward and in the loss, unless the advantage says that both are meant."""
    in_loss = [s for s in a.regularizers if s.charges_kl]
    if a.advantage.charges_kl and in_loss:
        raise IllegalCombinationError(
            f"{a.name}: {snake(a.advantage)} has the KL to the reference in the reward and {snake(in_loss[0])} has it "
            "in the loss: it would be counted twice; drop one, or set advantage.both=true"
        )


def check_ratios(a: Algorithm) -> None:
    """Refuse weights and surrogates that would multiply one ratio by another, or bound a ratio of another anchor."""
    carrying = [s for s in a.weights if s.carries_correction]
    if len(carrying) > 1:
        raise IllegalCombinationError(
            f"{a.name}: {' and '.join(map(snake, carrying))} both weigh by π_old/μ: the mismatch would be counted "
            "twice; keep one (a mask of 0 and 1, such as binary_kl_mask, may stand beside it)"
        )
    for stage in a.weights:
        if stage.is_ratio and a.ratio is not None:
            raise IllegalCombinationError(
                f"{a.name}: {snake(stage)} is a ratio of π_θ itself, beside {snake(a.ratio)}: they would be "
                "multiplied; leave the ratio slot empty (None)"
            )
    wanted, anchor = a.surrogate.ratio_anchor, None if a.ratio is None else a.ratio.anchor
    if wanted is not None and anchor != wanted:
        raise IllegalCombinationError(
            f"{a.name}: {snake(a.surrogate)} bounds a ratio anchored at {wanted!r}, the ratio is anchored at {anchor!r}"
        )


def check_outcomes(a: Algorithm) -> None:
    """Refuse a selection or shaping that works on another reward than the advantage: the outcome, or its parts."""
    wanted = "parts" if a.advantage.reads_parts else "outcome"
    for stage in a.selection:
        if stage.by not in (None, wanted):
            raise IllegalCombinationError(
                f"{a.name}: {snake(stage)} tests the reward's {stage.by} while {snake(a.advantage)} reads its "
                f"{wanted}: groups with a signal would be dropped or groups without one kept; set by={wanted!r}"
            )
        if stage.by == "parts" and {*stage.parts} != {*a.advantage.parts}:
            raise IllegalCombinationError(
                f"{a.name}: {snake(stage)} tests other parts of the reward than {snake(a.advantage)} reads; give both "
                "the same names"
            )
    if a.advantage.reads_parts and a.shaping:
        raise IllegalCombinationError(
            f"{a.name}: {snake(a.shaping[0])} changes the outcome, which {snake(a.advantage)} does not read; give the "
            "penalty as a part of the reward"
        )


class _Shown(NamedTuple):
    """A field that waits to be looked at: is an entry bad where it is trained?"""

    name: str
    value: Tensor
    trained: Tensor
    bad: Tensor


_SHOWN: ContextVar[list[_Shown] | None] = ContextVar("shown", default=None)


@contextlib.contextmanager
def checked_at_the_end() -> Iterator[None]:
    """Within it `check_finite` waits for no device: what it was shown is looked at on leaving, all in one go."""
    shown: list[_Shown] = []
    token = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(token)
    if shown and bool(torch.stack([s.bad for s in shown]).any()):
        for s in shown:
            _refuse_bad(s.name, s.value, s.trained)


def check_finite(rows: Rollouts | Policy, mask: Tensor, needs: frozenset[str]) -> None:
    """Raise `NonFiniteError` for a NaN or infinity at a trained position of a field that some stage reads."""
    shown = _SHOWN.get()
    for name, value in rows.tensors().items():
        per_token = rows._specs[name].axes.startswith("BT")
        if (name in needs or name == "logp") and per_token and value.dtype.is_floating_point:
            trained = mask.reshape(mask.shape + (1,) * (value.dim() - 2)).expand_as(value)
            if shown is None or masked.at_hand(value):
                _refuse_bad(name, value, trained)
            else:
                value = value.detach()
                shown.append(_Shown(name, value, trained, (trained & ~value.isfinite()).any()))


def _refuse_bad(name: str, value: Tensor, trained: Tensor) -> None:
    where = masked.first_bad(value, trained)
    if where:
        raise NonFiniteError(
            f"{name}: {value[where].item()} at the trained position {list(where[:2])} (rollout, token); "
            "mask that token or mend its log-prob"
        )


def check_groups_whole(a: Algorithm, prepared: Prepared) -> None:
    """Raise `ScopeError` if a stage must see whole groups and the minibatch splits one."""
    late = (a.advantage,) if a.advantage.policy_needs else ()  # an early one has seen its groups in prepare
    wide = [s for s in (*a.weights, *late, *a.live) if s.span >= Scope.GROUP]
    if not wide:
        return
    here = groups.group_count(prepared.rollouts.group, prepared.compared, prepared.shaped)
    if bool((here != prepared.group_size).any()):
        raise ScopeError(
            f"{snake(wide[0])} must see whole groups, but the minibatch splits one; cut minibatches between groups"
        )


def check_cut(batch: Batch, running: Sequence[Stage]) -> None:
    """Raise `ScopeError` if a stage of those that run on a microbatch must see more than its rows."""
    if batch.whole:
        return
    wide = [s for s in running if s.span > Scope.SEQUENCE]
    if any(s.span > Scope.GROUP for s in wide):
        raise ScopeError(f"{snake(wide[0])} couples rollouts: evaluate the whole minibatch, then cut its coefficients")
    if wide and not bool(batch.whole_groups.all()):
        raise ScopeError(
            f"{snake(wide[0])} couples the rollouts of a group, but the microbatch splits one: cut microbatches "
            "between groups, or evaluate the whole minibatch and cut its coefficients"
        )


def check_rows(part: Prepared, policy: Policy) -> None:
    """Raise `InputError` unless the policy terms have the shape of the rollouts' mask."""
    want = list(part.rollouts.mask.shape)
    for name, value in policy.tensors().items():
        axes = 2 if value.dim() > 1 else 1
        if list(value.shape[:axes]) != want[:axes]:
            raise InputError(
                f"policy.{name} has shape {list(value.shape)}, the rollouts' mask {want}; pass the same rows"
            )
