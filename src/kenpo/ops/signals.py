"""Rewards that a group makes for itself: votes, frequencies, distance to a target distribution, robust scales.

`answer` [B] is the identity of each row's answer, −1 for none. Rows outside `valid` count nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.groups import group_count, group_index, group_max, group_sum
from kenpo.ops.masked import divide, select


def answer_counts(answer: Tensor, group: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """[B] how many valid rows of the row's group gave the row's answer; 0 on rows without one.

    >>> a, g = torch.tensor([5, 5, 7, -1, 5]), torch.tensor([0, 0, 0, 0, 1])
    >>> answer_counts(a, g, torch.ones(5, dtype=torch.bool), torch.zeros(()))
    tensor([2., 2., 1., 0., 1.])
    """
    given = valid & (answer >= 0)
    if not len(answer):
        return torch.zeros_like(answer, dtype=like.dtype)
    _, pair = torch.unique(torch.stack([group.long(), answer.long()]), dim=1, return_inverse=True)
    return group_count(pair, given, like) * given


def majority(answer: Tensor, group: Tensor, valid: Tensor, ties: str) -> tuple[Tensor, Tensor]:
    """On each row [B], its group's most frequent answer and how many gave it; −1 and 0 if nobody answered.

    `ties`: "first" takes the answer whose first row stands first, "smallest" the smallest identity, which does not
    depend on the order of rows, "none" gives a tied group no label (−1).

    >>> a, g = torch.tensor([9, 3, 9, 3, -1]), torch.zeros(5, dtype=torch.long)
    >>> [majority(a, g, torch.ones(5, dtype=torch.bool), t)[0].tolist()[0] for t in ("first", "smallest", "none")]
    [9, 3, -1]
    """
    count = answer_counts(answer, group, valid, torch.zeros((), dtype=torch.float64, device=answer.device))
    most = group_max(count, group, valid)
    winning = (count == most) & (count > 0)
    place = torch.arange(len(answer), device=answer.device) if ties == "first" else answer.long()
    index, n = group_index(group)
    far = torch.iinfo(torch.int64).max
    first = place.new_full((n,), far).scatter_reduce(0, index, place.masked_fill(~winning, far), "amin")[index]
    leads = winning & (place == first)
    label = (
        answer.new_full((n,), -1).long().scatter_reduce(0, index, answer.long().masked_fill(~leads, -1), "amax")[index]
    )
    if ties == "none":
        label = label.masked_fill(group_sum(winning.to(most.dtype), group, winning) != most, -1)
    return label, most.long().masked_fill(label < 0, 0)


def frequency_reward(count: Tensor, answered: Tensor, choices: Tensor, usable: Tensor, invalid: float) -> Tensor:
    """[B] ``1 − (f − 1/L)`` with f = count/answered, L = `choices`; `invalid` on rows that are not usable."""
    f = divide(count, answered)
    return torch.where(usable, 1 - (f - divide(torch.ones_like(f), choices)), f.new_tensor(invalid))


def divergence_reward(target: Tensor, frequency: Tensor, kind: str) -> Tensor:
    """Minus the slope of D(p, f) in f, up to a constant per group: p and f > 0, of one category.

    "l2": p − f. "forward_kl": p/f − 1. "reverse_kl": log p − log f. "jsd": ½ (log m − log f), m = (p + f)/2.
    """
    if kind == "l2":
        return target - frequency
    if kind == "forward_kl":
        return target / frequency - 1
    if kind == "reverse_kl":
        return target.log() - frequency.log()
    return 0.5 * (((target + frequency) / 2).log() - frequency.log())


def group_median(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], the median of the valid rows of its group: the mean of the middle two of an even number.

    >>> x, g = torch.tensor([1.0, 9.0, 2.0, 4.0]), torch.tensor([0, 0, 0, 1])
    >>> group_median(x, g, torch.ones(4, dtype=torch.bool))
    tensor([2., 2., 2., 4.])
    """
    if not len(x):
        return x
    index, n = group_index(group)
    order = torch.argsort(x.masked_fill(~valid, torch.inf), stable=True)
    order = order[torch.argsort(index[order], stable=True)]  # by group, then by value; invalid rows last
    sorted_x = select(x, valid)[order]
    size = torch.bincount(index, minlength=n)
    start = size.cumsum(0) - size
    count = torch.bincount(index[valid], minlength=n)
    low, high = start + ((count - 1).clamp(min=0) // 2), start + (count // 2).clamp(max=size - 1)
    middle = (sorted_x[low] + sorted_x[high]) / 2
    return torch.where(count > 0, middle, torch.zeros_like(middle))[index]


def robust_score(x: Tensor, group: Tensor, valid: Tensor, eps: float) -> Tensor:
    """[B] ``(x − median)/(1.4826·MAD + eps)`` within the group, MAD the median of |x − median|; 0 where MAD is 0.

    >>> x, g = torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.zeros(4, dtype=torch.long)
    >>> robust_score(x, g, torch.ones(4, dtype=torch.bool), 0.0)
    tensor([-1.0117, -0.3372,  0.3372,  5.0587])
    """
    deviation = select(x - group_median(x, group, valid), valid)
    mad = group_median(deviation.abs(), group, valid)
    return select(divide(deviation, 1.4826 * mad + eps), mad > 0)


def dominance(parts: Tensor, valid: Tensor) -> Tensor:
    """[K,B] weighted advantages per axis -> the largest share of one axis in their mean magnitude, in [1/K, 1].

    0 if all are 0. Source: GPRL, arXiv:2605.18721.
    """
    share = select(parts.abs(), valid).sum(-1)
    return divide(share.amax(), share.sum())


def row_scaled(x: Tensor, mask: Tensor) -> Tensor:
    """[B,T] ``(x − min)/(max − min)`` over each row's own tokens, in [0, 1]; 0 where a row is constant, and off mask.

    >>> row_scaled(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool())
    tensor([[0.0000, 1.0000, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    low = x.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    high = x.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    spread = select(high - low, high > low)
    return select(divide(select(x - low, mask), spread.expand_as(x)), mask & (spread > 0))
