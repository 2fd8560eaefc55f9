"""Surrogate objectives: ratio and advantage in, objective out (to be maximised), element by element.

All take broadcastable tensors, in practice [B,T]; the advantage is a constant under the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``min(r·A, clamp(r, 1−low, 1+high)·A)``. Source: PPO, arXiv:1707.06347; two widths: DAPO, arXiv:2503.14476.

    >>> clip(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    tensor([ 1.2000, -1.5000])
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def outside(ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Where the clip acts: the ratio has left [1−low, 1+high] on the side the advantage pushes."""
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def soft_gate(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """``f(r) = (4/τ)·σ(τ(r−1))``, τ by the sign of A. Unit slope at r = 1. Source: SAPO, arXiv:2511.20347."""
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return 4 / tau * torch.sigmoid(tau * (ratio - 1))


def log_soft_gate(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Log of :func:`soft_gate`, by softplus: exact where the gate is nearly closed."""
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return (4 / tau).log() - torch.nn.functional.softplus(-tau * (ratio - 1))


def detached_clip(ratio: Tensor, advantages: Tensor, logp: Tensor, floor: float | None, cap: float | None) -> Tensor:
    """``sg[clamp(r, floor, cap)]·A·log π``: every token keeps a gradient. Source: CISPO, arXiv:2506.13585."""
    bounded = ratio.detach()
    if floor is not None or cap is not None:
        bounded = bounded.clamp(floor, cap)
    return bounded * advantages * logp
