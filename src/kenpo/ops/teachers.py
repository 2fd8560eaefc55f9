"""What a teacher's log-prob of the student's own tokens becomes: returns over later tokens, shares and cuts."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import divide, select


def later_sum(x: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """[B,T] ``x_t + d·x_(t+1) + d²·x_(t+2) + …`` over a row's selected tokens; masked positions are stepped over.

    >>> later_sum(torch.tensor([[1.0, 9.0, 2.0, 4.0]]), torch.tensor([[True, False, True, True]]), 0.5)
    tensor([[3., 0., 4., 4.]])
    """
    total, columns = torch.zeros_like(x[..., 0]), []
    for t in reversed(range(x.shape[-1])):
        total = torch.where(mask[..., t], select(x[..., t], mask[..., t]) + discount * total, total)
        columns.append(select(total, mask[..., t]))
    return torch.stack(columns[::-1], -1) if columns else x


def future(x: Tensor, mask: Tensor, *, mean: bool) -> Tensor:
    """[B,T] the sum (or mean) of `x` over the row's *later* selected tokens; 0 on its last.

    >>> future(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool), mean=True)
    tensor([[3., 4., 0.]])
    """
    rest = later_sum(x, mask) - select(x, mask)
    if not mean:
        return rest
    left = later_sum(torch.ones_like(x), mask) - mask.to(x.dtype)
    return select(divide(rest, left), mask)


def prefix_share(advantages: Tensor, mask: Tensor, boost: float) -> Tensor:
    """[B,T] ``1 + boost·(1 − Σ_{s<t}|A_s| / Σ_s|A_s|)``; 1 on a row whose advantages are all 0, 0 off the mask."""
    size = select(advantages.abs(), mask)
    whole = size.sum(-1, keepdim=True)
    earlier = divide(size.cumsum(-1) - size, whole.expand_as(size))
    return select(torch.where(whole > 0, 1 + boost * (1 - earlier), torch.ones_like(size)), mask)


def least_likely(logp: Tensor, mask: Tensor, share: float) -> Tensor:
    """[B,T] bool: the ⌊share·n⌋, at least one, of the n selected entries with the lowest `logp`, and those tied with
    the last of them."""
    values = logp[mask]
    if not len(values):
        return mask
    k = max(1, int(share * len(values) + 1e-9))
    return mask & (logp <= values.kthvalue(k).values)


def scaled_between(x: Tensor, chosen: Tensor) -> Tensor:
    """[B,T] `x` of the chosen entries scaled to [0, 1] between their least and greatest; 1 if they are all equal."""
    if not bool(chosen.any()):
        return torch.zeros_like(x)
    low, high = x[chosen].min(), x[chosen].max()
    return select((x - low) / (high - low) if bool(high > low) else torch.ones_like(x), chosen)
