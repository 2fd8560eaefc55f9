"""Log-ratios and the ratios made from them: per token, per sequence, power means."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import row_mean, row_sum, select

#: Log-ratios saturate here: exp(20) is about 4.9e8, far beyond any clip range, and finite in float32 when squared.
LIMIT = 20.0


def saturate(x: Tensor) -> Tensor:
    """`x` held within ±20; the gradient is 0 outside. A finite log-prob then never gives a non-finite loss.

    >>> saturate(torch.tensor([-50.0, 0.5, 120.0]))
    tensor([-20.0000,   0.5000,  20.0000])
    """
    return x.clamp(-LIMIT, LIMIT)


def log_ratio(logp: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """[B,T] ``log π − log anchor``, saturated at ±20, 0 off the mask."""
    return saturate(select(logp, mask) - select(anchor, mask))


def sequence_log_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B,1] mean log-ratio of each row: the log of the geometric mean of its token ratios. 0 for an empty row."""
    return row_mean(log_ratio, mask).unsqueeze(-1)


def sequence_log_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B,1] log of the product of a row's token ratios, saturated at ±20."""
    return saturate(row_sum(log_ratio, mask)).unsqueeze(-1)


def bound_outward(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Log-ratios held on the side the advantage pushes: at most `high` where A > 0, at least −`low` where A < 0.

    Bounds are distances in log space. The gradient is 0 where the bound acts. Source: GMPO, arXiv:2507.20673.
    """
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio)
    return torch.where(advantages < 0, log_ratio.clamp(min=-low), bounded)


def through_own_token(value: Tensor, log_ratio: Tensor) -> Tensor:
    """A sequence value whose gradient runs through each token's own log-ratio: ``sg[value] · r / sg[r]`` (GSPO-token).

    A token whose log-ratio is saturated gets no gradient, as in the sequence form.
    """
    return value.detach() * (log_ratio - log_ratio.detach()).exp()
