"""What decides which tokens or responses to trust: directions, budgets, quantiles, group masses. All inputs are
constants; nothing here carries a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kenpo.ops.groups import group_sum
from kenpo.ops.masked import count, divide, row_mean, select


def outward(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Where the update would move a token further from its anchor: A > 0 and r > 1, or A < 0 and r < 1.

    >>> outward(torch.tensor([0.1, -0.1]), torch.tensor([1.0, 1.0]))
    tensor([ True, False])
    """
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def within_moment(
    values: Tensor,
    chosen: Tensor,
    budget: float,
    *,
    strict: bool = False,
    least: bool = False,
    droppable: Tensor | None = None,
) -> Tensor:
    """Bool like `values`: what stays when the largest chosen values are dropped until their mean is ≤ `budget`.

    Entries that are not chosen stay. Values tied at the cut are dropped together, so the order of rows has no effect.
    `strict`: until the mean is < `budget`. `least`: the smallest chosen value stays whatever the budget. `droppable`:
    only these may go, if all of them need be, while the mean is over all chosen values that are left.
    Only values above the budget can ever be dropped (the mean cannot exceed it otherwise), so only those are looked at.

    >>> within_moment(torch.tensor([0.25, 0.01, 0.81, 0.09]), torch.tensor([True, True, False, True]), 0.06)
    tensor([False,  True,  True,  True])
    """
    fits = torch.lt if strict else torch.le
    above = chosen & ~fits(values, budget)
    above = above if droppable is None else above & droppable
    staying = chosen & ~above
    total, n = select(values, staying).sum(dtype=torch.float64), staying.sum()
    large, total, n, cut = _narrowed(values[above], total, n, lambda mean: bool(fits(mean, budget)))
    large = large.sort().values
    counts = n + torch.arange(1, large.numel() + 1, device=large.device)
    means = (total + large.cumsum(0, dtype=torch.float64)) / counts
    kept = int(fits(means, budget).sum())
    if least and kept == 0 and int(n) == 0 and large.numel():
        return ~above | (values <= large[0])
    if kept < large.numel():
        cut = large[kept]
    return torch.ones_like(chosen) if cut is None else ~above | (values < cut)


#: So many values are sorted at once; of more, those are looked for first among which the cut lies.
_FEW = 16384


def _narrowed(
    large: Tensor, total: Tensor, n: Tensor, fits: Callable[[Tensor], bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Halve `large`, values above the budget, until `_FEW` are left between what surely stays and what surely goes.

    Returns those left, sum and count of what stays, and the smallest that goes (None: none so far). If the mean with
    all values up to a pivot fits, they stay; if not, those beyond it go: every value exceeds the budget.
    """
    cut: Tensor | None = None
    while large.numel() > _FEW:
        lower = large <= large[:: max(1, large.numel() // 1024)].median()
        if bool(lower.all()):
            break
        more, count = select(large, lower).sum(dtype=torch.float64), lower.sum()
        if fits((total + more) / (n + count)):
            total, n, large = total + more, n + count, large[~lower]
        else:
            cut, large = large[~lower].min(), large[lower]
    return large, total, n, cut


def capped_moment(values: Tensor, budget: float) -> Tensor | None:
    """0-d: the cap that M2PO's released code puts on squared log-ratios; None if their mean is within `budget`.

    Sorted ascending, it looks for the point where Σ min(v, cap) reaches budget · n and returns the sorted value before
    it (the first value if there is none before). `values` [n] are those of the outward tokens.
    """
    n = values.numel()
    v = values.double()
    if n == 0 or float(v.mean()) <= budget:
        return None
    v = v.sort().values
    before = v.cumsum(0) - v
    reached = before + v * (n - torch.arange(n, device=v.device)) >= budget * n
    first = int((~reached).sum())  # what is reached grows along the sorted values
    return v[max(first - 1, 0)]


def quantile(values: Tensor, q: float) -> Tensor:
    """0-d: the `q`-quantile of a non-empty [n], linear between order statistics. By selection, without a sort.

    >>> quantile(torch.tensor([0.2, 2.0, 0.6, 3.0]), 0.75)
    tensor(2.2500)
    """
    place = q * (values.numel() - 1)
    k = min(int(place), values.numel() - 1)
    low = values.kthvalue(k + 1).values
    if k + 1 == values.numel() or place == k:
        return low
    return low + (values.kthvalue(k + 2).values - low) * (place - k)


def spurious(
    logp: Tensor, entropy: Tensor, advantages: Tensor, mask: Tensor, probability: float, q: float, conditional: bool
) -> Tensor:
    """[B,T] bool: rare and confident tokens of good responses. Source: STAPO, arXiv:2602.15620.

    Candidates have A > 0 and p < `probability`; of these, the ones with entropy strictly below the `q`-quantile of the
    candidates' entropies (`conditional`) or of all trainable tokens'. No candidate: none.
    """
    candidates = mask & (advantages > 0) & (logp.exp() < probability)
    if not bool(candidates.any()):
        return candidates
    return candidates & (entropy < quantile(entropy[candidates if conditional else mask], q))


def top_fraction(values: Tensor, chosen: Tensor, fraction: float) -> Tensor:
    """Bool like `values`: the largest max(1, ⌈fraction · n⌉) of the n chosen ones; those tied with the last belong to
    them. None chosen: none."""
    pool = values[chosen]
    n = pool.numel()
    if n == 0:
        return chosen
    wanted = min(max(1, math.ceil(fraction * n)), n)
    return chosen & (values >= pool.kthvalue(n - wanted + 1).values)


def adapted_boost(boost: float, damp: float, entropy: float, target: float, step: float = 0.01) -> tuple[float, float]:
    """STARE's adaptive rule: one step of (boost, damp) away from 1 while the entropy is below `target`, back above it.

    ``boost + step·sgn(target − H)`` held in [1, 1.5]; ``damp − step·sgn(target − H)`` held in [0.5, 1].
    """
    sign = (target > entropy) - (target < entropy)
    return min(max(boost + step * sign, 1.0), 1.5), min(max(damp - step * sign, 0.5), 1.0)


def capped_mass(ratio: Tensor, group: Tensor, valid: Tensor, cap: float) -> Tensor:
    """[B] ``r · min(1, cap / Σ_group r)``: one common scale per group, relative weights kept; 0 on invalid rows.

    >>> capped_mass(torch.tensor([3.0, 0.5, 0.2, 0.3]), torch.zeros(4).long(), torch.ones(4).bool(), 2.0)
    tensor([1.5000, 0.2500, 0.1000, 0.1500])
    """
    mass = group_sum(ratio, group, valid)
    return select(ratio * divide(ratio.new_tensor(cap).expand_as(mass), mass).clamp(max=1), valid)


def compatibility(receiver: Tensor, source: Tensor, threshold: float) -> Tensor:
    """GRAFT's weight of a peer's response: ``min(s, 1)`` where s > `threshold`, else 0; s = exp(receiver − source),
    both mean log-probs per token."""
    s = (receiver - source).exp()
    return select(s.clamp(max=1), s > threshold)


def normalised(weights: Tensor, mask: Tensor, by_row: bool) -> Tensor:
    """Weights [B,T] divided by their mean over tokens, or (`by_row`) over the rows' means; then the mean is 1."""
    if not by_row:
        return weights * divide(count(mask, weights), select(weights, mask).sum())
    filled = mask.any(-1)
    return weights * divide(count(filled, weights), select(row_mean(weights, mask), filled).sum())
