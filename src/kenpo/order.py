"""The order in which an algorithm's stages run, written once.

``prepare`` (whole rollout batch) → ``weigh`` (one optimizer minibatch) → ``objective`` (each microbatch); ``evaluate``
runs all three on a whole batch, ``coefficients`` turns the last one into d loss / d logp. All ranks see the same
batch in ``prepare`` and ``weigh``, so nothing here talks to a network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kenpo import metrics
from kenpo.checks import check_cut, check_finite, check_groups_whole, check_rows
from kenpo.errors import NonFiniteError, ScopeError
from kenpo.ops import groups, masked
from kenpo.stages.base import Advantage, Regularizer, Stage, Weight, reads_policy, snake
from kenpo.stages.context import Context, raised
from kenpo.types import POLICY_FIELDS, Advantaged, Batch, Loss, Policy, Prepared, Result, Rollouts, Totals

if TYPE_CHECKING:
    from kenpo.algorithm import Algorithm


def view(ctx: Context, stage: Stage) -> Context:
    """`ctx` as `stage` may see it."""
    return ctx.of(type(stage).__name__, stage.needs)


# -- prepare --------------------------------------------------------------------------------------------------------


def select(a: Algorithm, rollouts: Rollouts) -> Tensor:
    """[B] bool: the rollouts that the algorithm's selections keep, and the supervised rows.

    A rollout without a verdict (NaN) is never kept. Selections don't see supervised rows (``origin`` 4).
    """
    supervised = rollouts.supervised
    compared = ~rollouts.rewards.isnan() & ~supervised
    for stage in a.selection:
        compared = compared & stage(view(Context(rollouts, compared), stage))
    return compared | supervised


@torch.no_grad()
def prepare(a: Algorithm, rollouts: Rollouts, state: Any = None) -> Prepared:
    """Selection, shaping and advantage on one whole rollout batch (all ranks see the same batch).

    `state` is what the last batch's `Prepared.state` handed on. Raises `MissingFieldError` for a field that the
    advantage needs, `NonFiniteError` for a NaN or infinity at a trained position of a field that any stage reads.
    """
    return a.prepare(rollouts, state)


def run_prepare(a: Algorithm, rollouts: Rollouts, state: Any) -> Prepared:
    """`prepare` as most algorithms run it."""
    selected = select(a, rollouts)
    compared = selected & ~rollouts.supervised
    ctx = Context(rollouts, compared)
    check_finite(rollouts, rollouts.mask & selected.unsqueeze(-1), a.needs)
    rewards = masked.select(ctx.rewards, compared)
    if not bool(rewards.isfinite().all()):
        raise NonFiniteError(f"rewards: rollout {int((~rewards.isfinite()).nonzero()[0])} has an infinite reward")
    for stage in a.shaping:
        rewards = stage(rewards, view(ctx, stage))
    size = groups.group_count(rollouts.group, compared, rewards)
    early = Prepared(rollouts, None, selected, rewards, size, state=state)
    return early if a.advantage.policy_needs else _advantaged(a.advantage, early, ctx)


def _advantaged(stage: Advantage, prepared: Prepared, ctx: Context) -> Prepared:
    """`prepared` with the advantages, 0 off the mask, and with returns and state if the stage gives them."""
    found = stage(prepared.shaped, view(ctx, stage), prepared.state)
    made = found if isinstance(found, Advantaged) else Advantaged(found[0], None, found[1])
    if where := masked.first_bad(made.advantages, ctx.mask):
        raise NonFiniteError(
            f"advantages: {snake(stage)} gives {made.advantages[where].item()} to rollout {where[0]}; its reward is "
            f"{prepared.shaped[where[0]].item():g}: scale the rewards down"
        )
    return dataclasses.replace(
        prepared,
        advantages=masked.select(made.advantages.detach(), ctx.mask),
        returns=None if made.returns is None else masked.select(made.returns.detach(), ctx.mask),
        state=made.state,
    )


# -- weigh ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def weigh(a: Algorithm, prepared: Prepared, policy: Policy | None = None) -> Batch:
    """Weights and global totals of one whole optimizer minibatch (all ranks see the same minibatch).

    Without `policy`, weights that read it wait for each microbatch's own forward pass; that is refused (`ScopeError`)
    when a stage must see the minibatch whole under the current policy: see `Algorithm.two_phase`.
    """
    return a.weigh(prepared, policy)


def run_weigh(a: Algorithm, prepared: Prepared, policy: Policy | None) -> Batch:
    """`weigh` as most algorithms run it."""
    rollouts = prepared.rollouts
    reason = a.two_phase(rollouts, whole_groups=True)
    if policy is None and reason:
        raise ScopeError(
            f"{a.name} needs two phases: {reason}; pass the policy's terms of the whole minibatch to weigh"
        )
    if policy is not None:
        check_rows(prepared, policy)
        check_finite(policy, rollouts.mask & prepared.selected.unsqueeze(-1), a.needs)
    if prepared.advantages is None:
        prepared = _advantaged(a.advantage, prepared, Context(rollouts, prepared.compared, policy))
    assert prepared.advantages is not None
    check_groups_whole(a, prepared)
    ctx = Context(rollouts, prepared.compared, policy, prepared.advantages, prepared.returns)
    fresh = rollouts.logp_old is None
    pending = tuple(i for i, s in enumerate(a.weights) if policy is None and reads_policy(s, fresh))
    weights = _weights([s for i, s in enumerate(a.weights) if i not in pending], ctx)
    decided = a.surrogate.decided(view(ctx, a.surrogate))
    extra = {}
    for i, r in enumerate(a.regularizers):
        own = r.rows(view(ctx, r))
        if own is not None:
            rows = prepared.selected & rollouts.supervised if r.supervised else ctx.selected
            own = own & rows.unsqueeze(-1)
            extra[i] = own, _totals(ctx, own, rows, None, decided)
    totals = _totals(ctx, ctx.mask, ctx.selected, weights, decided)
    return Batch(prepared, prepared.advantages, weights, pending, totals, extra)


def _weights(stages: list[Weight], ctx: Context) -> Tensor | None:
    """[B,T] product of the stages' weights, 0 off the mask; None for no stage at all."""
    product: Tensor | None = None
    for stage in stages:
        w = stage(view(ctx, stage)).detach()
        w = masked.select(w.to(ctx.advantages.dtype), ctx.mask)
        product = w if product is None else product * w
    return product


def _totals(ctx: Context, mask: Tensor, rows: Tensor, weights: Tensor | None, decided: Tensor) -> Totals:
    """Counts of one minibatch over the positions in `mask` [B,T] and the rollouts in `rows` [B]."""
    like, group = ctx.advantages, ctx.group
    kept = mask if weights is None else mask & (weights > 0)
    tokens = masked.count(mask, like, -1)
    kept_tokens = tokens if weights is None else masked.count(kept, like, -1)
    everyone = torch.ones_like(rows)
    sequences = masked.count(rows, like)
    trajectory = ctx.trajectory
    return Totals(
        tokens=tokens.sum(),
        kept_tokens=kept_tokens.sum(),
        weight_sum=tokens.sum() if weights is None else weights.sum(),
        sequences=sequences,
        kept_sequences=masked.count(kept_tokens > 0, like),
        groups=groups.number_of_groups(group, rows, like),
        group_tokens=groups.group_sum(tokens, group, everyone),
        group_kept_tokens=groups.group_sum(kept_tokens, group, everyone),
        contrasts=groups.number_of_groups(group, decided, like),
        trajectories=sequences if trajectory is None else groups.number_of_groups(trajectory, rows, like),
    )


# -- objective ------------------------------------------------------------------------------------------------------


def objective(
    a: Algorithm, batch: Batch, policy: Policy, measure: bool = True, of: Collection[str] | None = None
) -> Loss:
    """A microbatch's share of the minibatch loss, with a graph to the policy's fields.

    `batch` are rows of what `weigh` returned, `policy` the same rows. Shares add up over microbatches and ranks.
    `measure` adds metrics as sums and counts. A batch with nothing left gives 0 with a graph. `of`: only the terms with
    a gradient to one of these policy fields (None: all), so that a critic's share needs no ``logp``.
    """
    return a.objective(batch, policy, measure) if of is None else a.objective(batch, policy, measure, of)


class Penalty(NamedTuple):
    """One regularizer's part of the loss: ``(share · penalty).sum()`` over `rows`; all [B,T]."""

    stage: Regularizer
    penalty: Tensor
    share: Tensor
    rows: Tensor


def run_objective(a: Algorithm, batch: Batch, policy: Policy, measure: bool, of: Collection[str] | None) -> Loss:
    """`objective` as most algorithms run it."""
    part = batch.prepared
    asked = a.reaches if of is None else frozenset(of)
    check_rows(part, policy)
    main = of is None or bool(asked & main_reaches(a))
    penalties = {i: r for i, r in enumerate(a.regularizers) if of is None or asked & r.reaches}
    core = [*(a.weights[i] for i in batch.pending), a.ratio, a.surrogate] if main else []
    check_cut(batch, [s for s in (*core, *penalties.values()) if s is not None])
    ctx = Context(part.rollouts, part.compared, policy, batch.advantages, part.returns)
    check_finite(policy, part.rollouts.mask & part.selected.unsqueeze(-1), a.needs)
    weights = batch.weights
    if batch.pending and main:
        with torch.no_grad():
            late = _weights([a.weights[i] for i in batch.pending], ctx)
        weights = late if weights is None or late is None else weights * late
    kept = ctx.mask if weights is None else ctx.mask & (weights > 0)
    scale = a.aggregate(ctx.mask, kept, batch.totals)
    ratio = None if a.ratio is None or not main else a.ratio(view(ctx, a.ratio))
    loss = _gain(a, batch, ctx, ratio, weights, scale) if main else batch.advantages.new_zeros(())
    terms = [_term(a, batch, ctx, kept, scale, i, r) for i, r in penalties.items()]
    for term in terms:
        loss = loss + (term.share * term.penalty).sum()
    weights = ctx.unit_mask(batch.advantages.dtype) if weights is None else weights
    if not measure:
        return Loss(loss, weights)
    with torch.no_grad():
        sums, extremes = metrics.measure(a, ctx, ratio, weights, terms, main)
        moved = metrics.distances(a, ctx) if main else {}
    return Loss(loss, weights, sums, extremes, moved)


def main_reaches(a: Algorithm) -> frozenset[str]:
    """The policy fields that the ratio and the surrogate send a gradient to."""
    return a.surrogate.reaches | (frozenset() if a.ratio is None else a.ratio.reaches)


def _gain(
    a: Algorithm, batch: Batch, ctx: Context, ratio: Tensor | None, weights: Tensor | None, scale: Tensor
) -> Tensor:
    """−Σ aggregate · weight · objective. An advantage of 0 and a masked token contribute exactly 0, seen to here."""
    gain = a.surrogate(ratio, view(ctx, a.surrogate))
    if masked.all_finite(gain):
        share = scale * (batch.advantages != 0)  # advantages are 0 off the mask
    else:
        share, gain = scale, masked.select(gain, batch.advantages != 0)
    return -(share * gain if weights is None else share * weights * gain).sum()


def _term(
    a: Algorithm, batch: Batch, ctx: Context, kept: Tensor, scale: Tensor, index: int, stage: Regularizer
) -> Penalty:
    rows = ctx.mask
    aggregate = stage.own_aggregate
    if index in batch.extra:
        rows, totals = batch.extra[index]
        scale = (aggregate or a.aggregate)(rows, rows, totals)
    elif aggregate is not None:
        scale = aggregate(ctx.mask, kept, batch.totals)
    return Penalty(stage, masked.select(stage(view(ctx, stage)), rows), scale, rows)


# -- whole batches and coefficients -----------------------------------------------------------------------------------


def _leaves(a: Algorithm, policy: Policy, of: Collection[str] | None) -> dict[str, Tensor]:
    """The policy's fields that may receive a gradient."""
    wanted = (a.reaches | a.needs) & POLICY_FIELDS.keys() if of is None else a.reaches & frozenset(of)
    return {n: v for n, v in policy.tensors().items() if n in wanted}


def coefficients(
    a: Algorithm, batch: Batch, policy: Policy, measure: bool = True, of: Collection[str] | None = None
) -> tuple[Loss, dict[str, Tensor]]:
    """The microbatch's loss without a graph, and d loss / d field for each policy field that the algorithm reads.

    The gradients are what a trainer hands to its own backward pass: ``logp.backward(gradients["logp"])``. Those of half
    precision fields are float32. `of`: a set of policy fields, those that one learner makes; only the terms whose
    gradients reach them are evaluated, and the gradients are of these fields.
    """
    leaves = {n: raised(v.detach()).requires_grad_() for n, v in _leaves(a, policy, of).items()}
    with torch.enable_grad():
        share = objective(a, batch, policy.detach().replace(**leaves), measure, of)
    gradients = _gradients(share.loss, leaves, retain=False)
    return dataclasses.replace(share, loss=share.loss.detach()), gradients


def _gradients(loss: Tensor, leaves: dict[str, Tensor], retain: bool) -> dict[str, Tensor]:
    """d loss / d leaf; 0 for a leaf that the loss does not read."""
    if not loss.requires_grad:
        return {n: torch.zeros_like(v) for n, v in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=retain, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {n: torch.zeros_like(v) if g is None else g.detach() for (n, v), g in pairs}


def evaluate(a: Algorithm, rollouts: Rollouts, policy: Policy, state: Any = None) -> Result:
    """`prepare`, `weigh` and `objective` on one whole batch that is also one optimizer minibatch.

    ``result.loss`` has a graph to `policy`'s fields where they require grad. See `kenpo.types.Result`.
    """
    prepared = prepare(a, rollouts, state)
    given = _leaves(a, policy, None)
    with torch.enable_grad():  # raised first: a coefficient may exceed what fp16 holds
        fields = {n: raised(v if v.requires_grad else v.detach().clone().requires_grad_()) for n, v in given.items()}
    policy = policy.replace(**fields)
    batch = weigh(a, prepared, policy.detach())
    with torch.enable_grad():
        share = objective(a, batch, policy)
    if bool((rollouts.mask & prepared.selected.unsqueeze(-1)).any()):
        metrics.warn_if_blind(a, share.moved)
    gradients = _gradients(share.loss, fields, retain=True)
    return Result(
        loss=share.loss,
        coefficients=gradients["logp"] if "logp" in gradients else torch.zeros_like(batch.advantages),
        advantages=batch.advantages,
        weights=share.weights,
        metrics=metrics.as_floats(share.sums, share.extremes),
        state=prepared.state,
        gradients=gradients,
    )
