"""An algorithm is a frozen record of stages; the order in which they run is written here, once.

``prepare`` (whole rollout batch) → ``weigh`` (one optimizer minibatch) → ``objective`` (each microbatch); ``evaluate``
runs all three on a whole batch, ``coefficients`` turns the last one into d loss / d logp. All ranks see the same
batch in ``prepare`` and ``weigh``, so nothing here talks to a network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kenpo import metrics
from kenpo.checks import check_combination, check_finite, check_groups_whole, check_rows
from kenpo.errors import IllegalCombinationError, InputError, NonFiniteError, ScopeError
from kenpo.ops import groups, masked
from kenpo.settings import apply_settings, differences, flat_settings
from kenpo.stages.base import (
    Advantage,
    Aggregate,
    Ratio,
    Regularizer,
    Scope,
    Selection,
    Shaping,
    Stage,
    Surrogate,
    Weight,
    snake,
)
from kenpo.stages.context import Context, raised
from kenpo.types import POLICY_FIELDS, Batch, Loss, Policy, Prepared, Result, Rollouts, Totals


@dataclass(frozen=True)
class Algorithm:
    """Named, typed slots. Tuples where a slot maps a type to itself, single stages where types differ.

    ``loss = Σ aggregate · (penalty − weight · objective)``. ``status``: "paper", "our reading" or "reconstruction".
    ``updates``: the most optimizer steps that may consume one rollout batch (None: any); a trainer refuses more.
    """

    name: str
    source: str
    advantage: Advantage
    surrogate: Surrogate
    aggregate: Aggregate
    ratio: Ratio | None = None
    selection: tuple[Selection, ...] = ()
    shaping: tuple[Shaping, ...] = ()
    weights: tuple[Weight, ...] = ()
    regularizers: tuple[Regularizer, ...] = ()
    status: str = "paper"
    updates: int | None = None

    SLOTS: ClassVar[dict[str, type[Stage]]] = {
        "selection": Selection, "shaping": Shaping, "advantage": Advantage, "weights": Weight, "ratio": Ratio,
        "surrogate": Surrogate, "regularizers": Regularizer, "aggregate": Aggregate,
    }  # fmt: skip

    def __post_init__(self) -> None:
        for slot, kind in self.SLOTS.items():
            value = getattr(self, slot)
            if slot in TUPLE_SLOTS:
                value = tuple(value)
                object.__setattr__(self, slot, value)
            for stage in _stages_of(value):
                if not isinstance(stage, kind):
                    raise InputError(f"{self.name}: {slot} takes {kind.__name__} stages, got {type(stage).__name__}")
            names = [snake(s) for s in _stages_of(value)]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise IllegalCombinationError(
                    f"{self.name}: {slot} holds {twice[0]} twice; combine them into one stage"
                )
        check_combination(self)

    # -- what the planner asks ------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in the order they run."""
        return tuple(s for slot in self.SLOTS for s in _stages_of(getattr(self, slot)))

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of Rollouts and Policy that the stages read."""
        return frozenset().union(*(s.needs for s in self.stages))

    @property
    def scope(self) -> Scope:
        """The widest scope of any stage."""
        return max(s.span for s in self.stages)

    def two_phase(self, rollouts: Rollouts | None = None) -> str | None:
        """Why the minibatch's log-probs must be known before `weigh`, or None if one phase will do.

        `rollouts` only tells whether ``logp_old`` is there; None assumes it is not.
        """
        fresh = rollouts is None or rollouts.logp_old is None
        if self.advantage.policy_needs:
            return f"{snake(self.advantage)} needs the policy's terms before advantages are known"
        for stage in self.weights:
            if stage.span > Scope.SEQUENCE and reads_policy(stage, fresh):
                return f"{snake(stage)} must see the whole {stage.span.name.lower()} under the current policy"
        live: list[Stage] = [s for s in (self.ratio, self.surrogate, *self.regularizers) if s is not None]
        for part in live:
            if part.span > Scope.SEQUENCE:
                return f"{snake(part)} couples the rollouts of a {part.span.name.lower()}"
        waiting = [snake(s) for s in self.weights if reads_policy(s, fresh)]
        if self.aggregate.counts_kept and waiting:
            return f"{snake(self.aggregate)} counts kept tokens and {waiting[0]} needs the policy to keep them"
        return None

    # -- variation ------------------------------------------------------------------------------------------------

    def but(self, **slots: Any) -> Algorithm:
        """A copy with some slots (or name, source, status) replaced."""
        unknown = slots.keys() - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise InputError(f"{self.name}: no slot {sorted(unknown)[0]!r}; slots are {', '.join(self.SLOTS)}")
        return dataclasses.replace(self, **slots)

    def with_settings(self, settings: Mapping[str, Any]) -> Algorithm:
        """A copy with numbers changed by dotted key, e.g. ``{"surrogate.low": 0.1, "regularizers": []}``.

        Raises `UnknownNameError` for a key that names no number of this algorithm, `InputError` for a value that does
        not fit. All settings are applied together, then checked.
        """
        return apply_settings(self, settings, tuple_slots=TUPLE_SLOTS)

    def adding(self, name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
        """A copy with one more weight, shaping, selection or regularizer; see `kenpo.stages.addable`."""
        from kenpo.stages import addable

        slot, stage = addable(name, settings)
        return self.but(**{slot: (*getattr(self, slot), stage)})

    def settings(self) -> dict[str, Any]:
        """Every number of every stage by dotted key, in running order."""
        return flat_settings(self)

    def diff(self, other: Algorithm) -> dict[str, tuple[Any, Any]]:
        """The slots or numbers in which two algorithms differ: ``{"surrogate.low": (0.2, 0.0003)}``."""
        return differences(self, other)

    # -- running order; a method that fits no slot overrides one of these -------------------------------------------

    def prepare(self, rollouts: Rollouts, state: Any = None) -> Prepared:
        """See `kenpo.prepare`."""
        return _prepare(self, rollouts, state)

    def weigh(self, prepared: Prepared, policy: Policy | None = None) -> Batch:
        """See `kenpo.weigh`."""
        return _weigh(self, prepared, policy)

    def objective(self, batch: Batch, policy: Policy, measure: bool = True) -> Loss:
        """See `kenpo.objective`."""
        return _objective(self, batch, policy, measure)


TUPLE_SLOTS = ("selection", "shaping", "weights", "regularizers")


def _stages_of(value: Any) -> tuple[Stage, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def reads_policy(stage: Stage, fresh: bool) -> bool:
    """Whether a stage reads the policy being optimised; without ``logp_old``, π_old is that policy too."""
    return bool(stage.policy_needs) or (fresh and "logp_old" in stage.needs)


# -- prepare --------------------------------------------------------------------------------------------------------


def select(a: Algorithm, rollouts: Rollouts) -> Tensor:
    """[B] bool: the rollouts that the algorithm's selections keep; a rollout without a verdict (NaN) is never kept."""
    selected = ~rollouts.rewards.isnan()
    for stage in a.selection:
        selected = selected & stage(Context(rollouts, selected).of(stage))
    return selected


@torch.no_grad()
def prepare(a: Algorithm, rollouts: Rollouts, state: Any = None) -> Prepared:
    """Selection, shaping and advantage on one whole rollout batch (all ranks see the same batch).

    `state` is what the last batch's `Prepared.state` handed on. Raises `MissingFieldError` for a field that the
    advantage needs, `NonFiniteError` for a NaN or infinity at a trained position of a field that any stage reads.
    """
    return a.prepare(rollouts, state)


def _prepare(a: Algorithm, rollouts: Rollouts, state: Any) -> Prepared:
    selected = select(a, rollouts)
    ctx = Context(rollouts, selected)
    check_finite(rollouts, ctx.mask, a.needs)
    rewards = masked.select(ctx.rewards, selected)
    if not bool(rewards.isfinite().all()):
        raise NonFiniteError(f"rewards: rollout {int((~rewards.isfinite()).nonzero()[0])} has an infinite reward")
    for stage in a.shaping:
        rewards = stage(rewards, ctx.of(stage))
    advantages, handed_on = None, state
    if not a.advantage.policy_needs:
        advantages, handed_on = a.advantage(rewards, ctx.of(a.advantage), state)
        advantages = masked.select(advantages, ctx.mask)
    size = groups.group_count(rollouts.group, selected, rewards)
    return Prepared(rollouts, advantages, selected, rewards, size, state=handed_on)


# -- weigh ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def weigh(a: Algorithm, prepared: Prepared, policy: Policy | None = None) -> Batch:
    """Weights and global totals of one whole optimizer minibatch (all ranks see the same minibatch).

    Without `policy`, weights that read it wait for each microbatch's own forward pass; that is refused (`ScopeError`)
    when a stage must see the minibatch whole under the current policy: see `Algorithm.two_phase`.
    """
    return a.weigh(prepared, policy)


def _weigh(a: Algorithm, prepared: Prepared, policy: Policy | None) -> Batch:
    reason = a.two_phase(prepared.rollouts)
    if policy is None and reason:
        raise ScopeError(
            f"{a.name} needs two phases: {reason}; pass the policy's terms of the whole minibatch to weigh"
        )
    fresh = prepared.rollouts.logp_old is None
    ctx = Context(prepared.rollouts, prepared.selected, policy, prepared.advantages)
    if policy is not None:
        check_rows(prepared, policy)
        check_finite(policy, ctx.mask, a.needs)
    advantages = prepared.advantages
    if advantages is None:
        late, _ = a.advantage(prepared.shaped, ctx.of(a.advantage), prepared.state)
        advantages = masked.select(late, ctx.mask)
        ctx = Context(prepared.rollouts, prepared.selected, policy, advantages)
    pending = tuple(i for i, s in enumerate(a.weights) if policy is None and reads_policy(s, fresh))
    now = [s for i, s in enumerate(a.weights) if i not in pending]
    check_groups_whole(a, prepared, now)
    weights = _weights(now, ctx)
    extra = {
        i: (own & ctx.selected.unsqueeze(-1), _totals(ctx, own, None))
        for i, r in enumerate(a.regularizers)
        if (own := r.rows(ctx.of(r))) is not None
    }
    return Batch(prepared, advantages, weights, pending, _totals(ctx, ctx.mask, weights), extra)


def _weights(stages: list[Weight], ctx: Context) -> Tensor | None:
    """[B,T] product of the stages' weights, 0 off the mask; None for no stage at all."""
    product: Tensor | None = None
    for stage in stages:
        w = stage(ctx.of(stage)).detach()
        w = masked.select(w.to(ctx.advantages.dtype), ctx.mask)
        product = w if product is None else product * w
    return product


def _totals(ctx: Context, mask: Tensor, weights: Tensor | None) -> Totals:
    """Counts of one minibatch, in the dtype of the advantages."""
    like = ctx.advantages
    mask = mask & ctx.selected.unsqueeze(-1)
    kept = mask if weights is None else mask & (weights > 0)
    tokens = masked.count(mask, like, -1)
    kept_tokens = tokens if weights is None else masked.count(kept, like, -1)
    everyone = torch.ones_like(ctx.selected)
    return Totals(
        tokens=tokens.sum(),
        kept_tokens=kept_tokens.sum(),
        weight_sum=tokens.sum() if weights is None else weights.sum(),
        sequences=masked.count(ctx.selected, like),
        kept_sequences=masked.count(kept_tokens > 0, like),
        groups=like.new_tensor(ctx.group[ctx.selected].unique().numel()),
        group_tokens=groups.group_sum(tokens, ctx.group, everyone),
        group_kept_tokens=groups.group_sum(kept_tokens, ctx.group, everyone),
    )


# -- objective ------------------------------------------------------------------------------------------------------


def objective(a: Algorithm, batch: Batch, policy: Policy, measure: bool = True) -> Loss:
    """A microbatch's share of the minibatch loss, with a graph to the policy's fields.

    `batch` are rows of what `weigh` returned, `policy` the same rows. Shares add up over microbatches and ranks.
    `measure` adds metrics as sums and counts. A batch with nothing left gives 0 with a graph.
    """
    return a.objective(batch, policy, measure)


def _objective(a: Algorithm, batch: Batch, policy: Policy, measure: bool) -> Loss:
    part = batch.prepared
    check_rows(part, policy)
    if not batch.whole and (coupled := [s for s in (a.ratio, a.surrogate) if s and s.span > Scope.SEQUENCE]):
        raise ScopeError(
            f"{snake(coupled[0])} couples rollouts: evaluate the whole minibatch, then cut its coefficients"
        )
    ctx = Context(part.rollouts, part.selected, policy, batch.advantages)
    check_finite(policy, ctx.mask, a.needs)
    weights = batch.weights
    if batch.pending:
        with torch.no_grad():
            late = _weights([a.weights[i] for i in batch.pending], ctx)
        weights = late if weights is None or late is None else weights * late
    kept = ctx.mask if weights is None else ctx.mask & (weights > 0)
    ratio = None if a.ratio is None else a.ratio(ctx.of(a.ratio))
    gain = a.surrogate(ratio, ctx.of(a.surrogate))
    metrics.warn_if_blind(a, ctx)
    scale = a.aggregate(ctx.mask, kept, batch.totals)
    # An advantage of 0 and a masked token contribute exactly 0; this is the one place that sees to it.
    if masked.all_finite(gain):
        share = scale * (batch.advantages != 0)  # advantages are 0 off the mask
    else:
        share, gain = scale, masked.select(gain, batch.advantages != 0)
    loss = -(share * gain if weights is None else share * weights * gain).sum()
    penalties = []
    for i, stage in enumerate(a.regularizers):
        penalty, rows, part_of = _penalty(a, batch, ctx, kept, scale, i, stage)
        loss = loss + (part_of * penalty).sum()
        penalties.append((stage, penalty.detach(), part_of, rows))
    weights = ctx.unit_mask(batch.advantages.dtype) if weights is None else weights
    if not measure:
        return Loss(loss, weights)
    with torch.no_grad():
        sums, extremes = metrics.measure(a, ctx, ratio, weights, penalties)
    return Loss(loss, weights, sums, extremes)


def _penalty(a, batch: Batch, ctx: Context, kept: Tensor, scale: Tensor, index: int, stage: Regularizer):
    """One regularizer's [B,T] penalty, the rows it covers and the linear weight of each token in the loss."""
    rows = ctx.mask
    aggregate = stage.own_aggregate
    if index in batch.extra:
        rows, totals = batch.extra[index]
        scale = (aggregate or a.aggregate)(rows, rows, totals)
    elif aggregate is not None:
        scale = aggregate(ctx.mask, kept, batch.totals)
    return masked.select(stage(ctx.of(stage)), rows), rows, scale


# -- whole batches and coefficients -----------------------------------------------------------------------------------


def _leaves(policy: Policy, needs: frozenset[str]) -> dict[str, Tensor]:
    """The policy's differentiable fields that may receive a gradient."""
    names = [n for n in policy.tensors() if n == "logp" or n in needs & POLICY_FIELDS.keys()]
    return {n: getattr(policy, n) for n in names}


def coefficients(a: Algorithm, batch: Batch, policy: Policy, measure: bool = True) -> tuple[Loss, dict[str, Tensor]]:
    """The microbatch's loss without a graph, and d loss / d field for each policy field that the algorithm reads.

    The gradients are what a trainer hands to its own backward pass: ``logp.backward(gradients["logp"])``. Those of half
    precision fields are float32.
    """
    leaves = {n: raised(v.detach()).requires_grad_() for n, v in _leaves(policy, a.needs).items()}
    with torch.enable_grad():
        share = objective(a, batch, policy.detach().replace(**leaves), measure)
        found = torch.autograd.grad(share.loss, list(leaves.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}
    return dataclasses.replace(share, loss=share.loss.detach()), gradients


def evaluate(a: Algorithm, rollouts: Rollouts, policy: Policy, state: Any = None) -> Result:
    """`prepare`, `weigh` and `objective` on one whole batch that is also one optimizer minibatch.

    ``result.loss`` has a graph to `policy`'s fields where they require grad. See `kenpo.types.Result`.
    """
    prepared = prepare(a, rollouts, state)
    given = _leaves(policy, a.needs)
    with torch.enable_grad():  # raised first: a coefficient may exceed what fp16 holds
        fields = {n: raised(v if v.requires_grad else v.detach().clone().requires_grad_()) for n, v in given.items()}
    policy = policy.replace(**fields)
    batch = weigh(a, prepared, policy.detach())
    with torch.enable_grad():
        share = objective(a, batch, policy)
        found = torch.autograd.grad(share.loss, list(fields.values()), retain_graph=True, allow_unused=True)
    pairs = zip(fields, found, strict=True)
    gradients = {n: torch.zeros_like(fields[n]) if g is None else g.detach() for n, g in pairs}
    figures = metrics.as_floats(share.sums, share.extremes)
    return Result(
        loss=share.loss,
        coefficients=gradients["logp"],
        advantages=batch.advantages,
        weights=share.weights,
        metrics=figures,
        state=prepared.state,
        gradients=gradients,
    )
