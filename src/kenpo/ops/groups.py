"""Statistics of rollouts that share a group id. Rows outside `valid` enter no statistic and get 0."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import divide, row_mean, select


def group_index(group: Tensor) -> tuple[Tensor, int]:
    """Group ids [B] as indices 0…n-1 [B], and n. Members of a group need not stand together."""
    if group.numel() == 0:
        return group.long(), 0
    ids, index = torch.unique(group, return_inverse=True)
    return index, int(ids.numel())


def group_sum(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], the sum of `x` over the valid rows of its group.

    >>> group_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 7, 3]), torch.tensor([True, True, True]))
    tensor([3., 3., 4.])
    """
    index, n = group_index(group)
    return x.new_zeros(n).index_add(0, index, select(x, valid))[index]


def group_count(group: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """On each row [B], how many valid rows its group has, in the dtype of `like`."""
    return group_sum(torch.ones_like(group, dtype=like.dtype), group, valid)


def number_of_groups(group: Tensor, present: Tensor, like: Tensor) -> Tensor:
    """How many groups hold a row where `present` [B] is true, in the dtype of `like`.

    >>> number_of_groups(torch.tensor([4, 4, 9]), torch.tensor([True, True, False]), torch.zeros(()))
    tensor(1.)
    """
    index, n = group_index(group)
    held = like.new_zeros(n).index_add(0, index, present.to(like.dtype)) > 0
    return held.sum(dtype=like.dtype)


def group_mean(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], the mean of `x` over the valid rows of its group; 0 where there are none."""
    return divide(group_sum(x, group, valid), group_count(group, valid, x))


def group_varies(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], whether the valid rows of its group hold two different values of `x`.

    Compared as numbers, not through a standard deviation: the mean of equal numbers may be off by one bit.
    """
    index, n = group_index(group)
    low = x.new_full((n,), torch.inf).scatter_reduce(0, index, x.masked_fill(~valid, torch.inf), "amin")
    high = x.new_full((n,), -torch.inf).scatter_reduce(0, index, x.masked_fill(~valid, -torch.inf), "amax")
    return (high > low)[index] & valid


def group_std(x: Tensor, group: Tensor, valid: Tensor, ddof: int, inside: float = 0.0) -> Tensor:
    """On each row [B], ``√(variance + inside)`` of `x` in its group, `ddof` degrees of freedom taken off; an undefined
    variance is 0.

    Deviations are scaled by a power of two before they are squared, so that large rewards don't overflow.

    >>> group_std(torch.tensor([3e30, 1e30]), torch.tensor([0, 0]), torch.tensor([True, True]), ddof=0)
    tensor([1.0000e+30, 1.0000e+30])
    """
    deviation = select(x - group_mean(x, group, valid), valid)
    scale = _power_of_two(group_max(deviation.abs(), group, valid))
    scaled = deviation / scale
    freedom = (group_count(group, valid, x) - ddof).clamp(min=0)
    variance = divide(group_sum(scaled * scaled, group, valid), freedom)
    return (variance + inside / scale / scale).sqrt() * scale


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is ≤ `x`, at least 1: dividing by it and multiplying again changes no digit."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1).clamp(min=1)


def centred(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """[B] `x` minus the mean of its group; exactly 0 in a uniform or single-member group and on invalid rows."""
    return select(x - group_mean(x, group, valid), group_varies(x, group, valid))


def zscore(x: Tensor, group: Tensor, valid: Tensor, *, eps: float, ddof: int) -> Tensor:
    """[B] ``(x - mean) / (std + eps)`` within the group; exactly 0 in a uniform or single-member group.

    >>> zscore(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([True, True]), eps=0.0, ddof=1)
    tensor([ 0.7071, -0.7071])
    """
    std = group_std(x, group, valid, ddof)
    return centred(x, group, valid) / (std + eps) if eps else divide(centred(x, group, valid), std)


def leave_one_out(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """[B] `x` minus the mean of the *other* members of its group: centred × G/(G−1); 0 for a member that is alone."""
    size = group_count(group, valid, x)
    return divide(centred(x, group, valid) * size, (size - 1).clamp(min=0))


def others_std(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], the standard deviation (ddof 1) of the *other* valid rows of its group.

    Exactly 0 where they are all equal, fewer than two, or the row is not valid.

    >>> x = torch.tensor([1.0, 0.0, 1.0, 1.0])
    >>> others_std(x, torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool))
    tensor([0.5774, 0.0000, 0.5774, 0.5774])
    """
    index, n = group_index(group)
    found = torch.zeros_like(x)
    for g in range(n):
        rows = ((index == g) & valid).nonzero().flatten()
        k = len(rows)
        if k < 3:
            continue
        others = x[rows].repeat(k, 1)[~torch.eye(k, dtype=torch.bool, device=x.device)].reshape(k, k - 1)
        seen = torch.ones_like(others, dtype=torch.bool)
        deviation = others - row_mean(others, seen).unsqueeze(-1)
        std = divide(deviation.square().sum(-1), torch.full_like(x[rows], k - 2)).sqrt()
        found[rows] = select(std, others.amax(-1) > others.amin(-1))
    return found


def leave_one_out_normalised(x: Tensor, group: Tensor, valid: Tensor, *, eps: float) -> Tensor:
    """[B] `leave_one_out` over (std of the others + eps); undivided where that std is 0 or there are fewer than two."""
    std = others_std(x, group, valid)
    return leave_one_out(x, group, valid) / torch.where(std > 0, std + eps, torch.ones_like(std))


def group_max(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], the largest `x` among the valid rows of its group; 0 where there are none."""
    index, n = group_index(group)
    top = x.new_full((n,), -torch.inf).scatter_reduce(0, index, x.masked_fill(~valid, -torch.inf), "amax")
    return torch.where(top.isinf(), x.new_zeros(()), top)[index]


def zero_sum(x: Tensor, cost: Tensor, group: Tensor, valid: Tensor, *, beta: float) -> Tensor:
    """[B] ``a/s − beta·(cost − mean cost)``, a = x − mean, s = max |a| in the group; sums to 0 over the group.

    Exactly 0 in a uniform or single-member group. Source: ZCPO, arXiv:2610.12161.

    >>> everyone = torch.ones(4, dtype=torch.bool)
    >>> x, cost = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    >>> zero_sum(x, cost, torch.zeros(4, dtype=torch.long), everyone, beta=4.0)
    tensor([ 1.6000, -0.8000, -1.2000,  0.4000])
    """
    a = centred(x, group, valid)
    surplus = cost - group_mean(cost, group, valid)
    scaled = divide(a, group_max(a.abs(), group, valid)) - beta * surplus
    return select(scaled, group_varies(x, group, valid))


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the selected entries, var with ddof 1; exactly 0 if they are all equal.

    Entries off the mask are 0. A single selected entry gives 0.
    """
    n = mask.sum(dtype=x.dtype)
    deviation = select(x - divide(select(x, mask).sum(), n), mask)
    scale = _power_of_two(deviation.abs().amax() if x.numel() else n)
    variance = divide((deviation / scale).square().sum(), (n - 1).clamp(min=0))
    std = (variance + eps / scale / scale).sqrt() * scale
    low = x.masked_fill(~mask, torch.inf).amin() if x.numel() else n
    high = x.masked_fill(~mask, -torch.inf).amax() if x.numel() else n
    return select(deviation / std, mask & (high > low))


def batch_scaled(x: Tensor, group: Tensor, valid: Tensor, *, eps: float) -> Tensor:
    """[B] `x` minus its group's mean, over (standard deviation of all valid rows of the batch, ddof 1, + eps).

    >>> x, g = torch.tensor([0.0, 1.0, 0.0, 10.0]), torch.tensor([0, 0, 1, 1])
    >>> batch_scaled(x, g, torch.ones(4, dtype=torch.bool), eps=0.0)
    tensor([-0.1030,  0.1030, -1.0296,  1.0296])
    """
    std = group_std(x, torch.zeros_like(group), valid, 1)
    return divide(centred(x, group, valid), std + eps)
