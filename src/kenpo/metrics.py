"""Metrics of one microbatch as sums and counts, so that they add up over microbatches and ranks.

Averages are over the same tokens the loss used: the trainable tokens of selected rollouts. A penalty's average follows
the loss's own aggregation. Ratios are reported raw, before any bound.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kenpo.errors import NoDivergenceWarning
from kenpo.ops import divergences, masked, ratios
from kenpo.stages.base import snake
from kenpo.stages.context import Context
from kenpo.types import ANCHORS

if TYPE_CHECKING:
    from kenpo.algorithm import Algorithm
    from kenpo.order import Penalty

Sums = dict[str, tuple[Tensor, Tensor]]


def measure(
    a: Algorithm, ctx: Context, ratio: Tensor | None, weights: Tensor, terms: Sequence[Penalty], main: bool
) -> tuple[Sums, dict[str, Tensor]]:
    """(sums, extremes) of one microbatch; see the table in docs/metrics.md. Runs without grad.

    `main`: the surrogate was evaluated; without it only the regularizers' `terms` are measured.
    """
    mask, advantages = ctx.mask, ctx.advantages
    tokens = masked.count(mask, advantages)
    sums: Sums = {}
    extremes: dict[str, Tensor] = {}

    def average(name: str, x: Tensor, where: Tensor = mask) -> None:
        x = x.to(advantages.dtype).expand_as(mask)
        sums[name] = (masked.select(x, where).sum(), masked.count(where, advantages))

    for term in terms:
        sums[snake(term.stage)] = ((term.share * term.penalty).sum(), masked.select(term.share, term.rows).sum())
        bound = term.stage.clipped(ctx)
        if bound is not None:
            average(f"{snake(term.stage)}_clipped", bound, term.rows)
    if not main:
        return sums, extremes
    average("advantage_abs", advantages.abs())
    sums |= a.surrogate.figures(ctx)
    if ratio is not None:
        average("ratio", ratio.detach())
        average("ratio_squared", ratio.detach() ** 2)
        extremes["ratio_max"] = masked.select(ratio.detach().expand_as(mask), mask).amax() if mask.numel() else tokens
        bounds = [b for b in (a.ratio.bounded(ctx), a.surrogate.clipped(ratio.detach(), ctx)) if b is not None]  # type: ignore[union-attr]
        if bounds:
            acts = torch.stack([b.expand_as(mask) for b in bounds]).any(0)
            average("clip_high", acts & (advantages > 0))
            average("clip_low", acts & (advantages < 0))
    if a.weights:
        average("weight", weights)
        average("weight_squared", weights * weights)
        average("kept", weights > 0)
    _anchored(ctx, average, extremes)
    if ctx.has("entropy"):
        average("entropy", ctx.read("entropy").detach())
    return sums, extremes


def _anchored(ctx: Context, average: Callable[..., None], extremes: dict[str, Tensor]) -> None:
    """Divergence from the sampler and from π_old, for whichever of them the batch carries."""
    if not ctx.has("logp"):
        return
    sampled = ctx.mask & ~ctx.elsewhere.unsqueeze(-1)  # what others wrote says nothing of the sampler
    for name, field in ANCHORS.items():
        if not ctx.has(field):
            continue
        where = sampled if name == "sampler" else ctx.mask
        raw = ctx.logp.detach() - ctx.read(field)
        d = ratios.saturate(raw)
        average(f"kl_{name}", divergences.k3(d), where)
        average(f"kl_{name}_k1", divergences.k1(d), where)
        average(f"saturated_{name}", raw.abs() > ratios.LIMIT, where)
    if ctx.has("logp_sampler"):
        gap = (ctx.read("logp_old").detach() - ctx.read("logp_sampler")).abs()
        most = masked.select(gap, sampled).amax() if gap.numel() else gap.sum()
        extremes["sampler_gap"] = most.where(sampled.any() | ~ctx.mask.any(), -math.inf)  # nothing of the sampler's


def distances(a: Algorithm, ctx: Context) -> dict[str, Tensor]:
    """Of every stage that acts on a distance (`Stage.anchor_sensitive`), by its name: 0-d bool, is there any here?

    One microbatch says little: a caller ors these over the whole minibatch, then asks `blind`.
    """
    found = {}
    for stage in a.stages:
        if stage.anchor_sensitive and stage.distance is not None and stage.anchor is not None:
            x = ctx.log_ratio(stage.anchor) if stage.distance[0] == "policy" else ctx.log_correction(stage.anchor)
            found[snake(stage)] = x.detach().any()
    return found


def blind(a: Algorithm, moved: Mapping[str, Tensor | bool]) -> str | None:
    """What to say of a stage that acts on a distance and saw none on any token of the whole minibatch, or None.

    `moved`: `Loss.moved`, joined by "or" over the minibatch's shares. Exactly equal log-probs on every token mean, in a
    loop that brings its own, that they were scored again by the trainer where the sampler's should stand. (With one
    update of a fresh batch and an engine in the trainer's process there is no distance, and nothing is wrong.)
    """
    for stage in a.stages:
        if snake(stage) in moved and not bool(moved[snake(stage)]):
            own = stage.distance is not None and stage.distance[0] == "policy"
            pair = f"the policy and {stage.anchor!r}" if own else f"π_{stage.anchor} and the sampler"
            return (
                f"{a.name}: {snake(stage)} acts on the distance between {pair}, but every log-ratio of the batch is "
                "exactly 0, so it does nothing; record the sampler's own log-probs instead of scoring them again"
            )
    return None


_WARNED: set[str] = set()


def warn_if_blind(a: Algorithm, moved: Mapping[str, Tensor | bool]) -> None:
    """Give `blind`'s answer as a `NoDivergenceWarning`, once per process and algorithm."""
    text = None if a.name in _WARNED else blind(a, moved)
    if text is not None:
        _WARNED.add(a.name)
        warnings.warn(text, NoDivergenceWarning, stacklevel=3)


def as_floats(sums: Mapping[str, tuple[Tensor, Tensor]], extremes: Mapping[str, Tensor]) -> dict[str, float]:
    """Averages and maxima as plain numbers; over nothing they are NaN. Adds the effective sample size of the
    weights, ``(Σw)² / (n·Σw²)`` in (0, 1], and of the ratio likewise."""
    out = {name: float(s) / float(n) if float(n) else math.nan for name, (s, n) in sums.items()}
    out.update({name: float(v) if v > -math.inf else math.nan for name, v in extremes.items()})
    if out.get("weight_squared"):
        out["effective_sample_size"] = out["weight"] ** 2 / out["weight_squared"]
    if out.get("ratio_squared"):
        out["ratio_effective_sample_size"] = out["ratio"] ** 2 / out["ratio_squared"]
    return out
