"""Sums and means over selected positions. The only place that divides by a count.

Masked entries are selected away, never multiplied away, because ``0 * nan`` is ``nan``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask` is true, exactly 0 elsewhere, in value and in gradient. Shapes broadcast.

    >>> select(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return torch.where(mask, x, x.new_zeros(()))


def at_hand(x: Tensor) -> bool:
    """Whether numbers of `x` can be read at once. On another device the host would wait for all that runs there."""
    return x.device.type == "cpu"


def all_finite(x: Tensor) -> bool:
    """Whether one sum shows every entry to be finite; False also where only the sum overflows, and if not `at_hand`."""
    return at_hand(x) and bool(torch.isfinite(x.detach().sum()))


def divide(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``, and 0 (with `total`'s graph) where the count is 0.

    >>> divide(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([1.5000, 0.0000])
    """
    empty = count == 0
    return select(total, ~empty) / torch.where(empty, torch.ones_like(count), count)


def count(mask: Tensor, like: Tensor, dim: int | None = None) -> Tensor:
    """How many entries of `mask` are true, in the dtype of `like`: over everything, or along `dim`."""
    return (mask.sum() if dim is None else mask.sum(dim)).to(like.dtype)


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[B,T] -> [B]: the sum over a row's selected positions."""
    return select(x, mask).sum(-1)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B,T] -> [B]: the mean over a row's selected positions; 0 for a row without any."""
    return divide(row_sum(x, mask), count(mask, x, -1))


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over all selected positions; 0 if there are none."""
    return divide(select(x, mask).sum(), count(mask, x))


def first_bad(x: Tensor, mask: Tensor) -> tuple[int, ...] | None:
    """Index of the first selected entry that is NaN or infinite, or None.

    One sum decides: it is finite unless an entry is not, or the sum itself overflows, which the second look sorts out.
    """
    if all_finite(x):
        return None
    kept = select(x.detach(), mask)
    bad = (~torch.isfinite(kept)).nonzero()
    return tuple(bad[0].tolist()) if len(bad) else None
