"""Surrogate objectives: ratio and advantage in, objective out (to be maximised), element by element.

All take broadcastable tensors, in practice [B,T]; the advantage is a constant under the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import select

#: (low, high), distances from 1.
Band = tuple[float, float]


def clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``min(r·A, clamp(r, 1−low, 1+high)·A)``. Source: PPO, arXiv:1707.06347; two widths: DAPO, arXiv:2503.14476.

    >>> clip(torch.tensor([1.5, 1.5]), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    tensor([ 1.2000, -1.5000])
    """
    return smaller(ratio * advantages, ratio.detach().clamp(1 - low, 1 + high) * advantages)


def smaller(free: Tensor, held: Tensor) -> Tensor:
    """The minimum of an objective and what a clip holds it at; where they are equal, with the gradient of `free`.

    Inside the bounds they are the same number, so this is the gradient of ``min(r·A, clamp(r)·A)`` at fewer passes.
    """
    return torch.where(free <= held, free, held)


def dual_clip(objective: Tensor, advantages: Tensor, dual: float) -> Tensor:
    """`objective` held at ``dual·A`` from below where A < 0: a token whose ratio exploded teaches no more.

    >>> dual_clip(torch.tensor([-9.0, 1.2]), torch.tensor([-1.0, 1.0]), 3.0)
    tensor([-3.0000,  1.2000])
    """
    return torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)


def clip_between(ratio: Tensor, advantages: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """``min(r·A, clamp(r, floor, cap)·A)`` with bounds [B,T] of each token's own, absolute and constant."""
    return smaller(ratio * advantages, ratio.detach().clamp(floor, cap) * advantages)


def gradient_preserving_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``min(r·A, clamp(sg[r], 1−low, 1+high)·(r/sg[r])·A)``: the clip's value, and beyond a bound the gradient that a
    ratio held at the bound would have. Source: GPPO, arXiv:2508.07629.

    >>> r = torch.tensor([1.5], requires_grad=True)
    >>> gradient_preserving_clip(r.log().exp(), torch.tensor([1.0]), 0.2, 0.28)
    tensor([1.2800], grad_fn=<MinimumBackward0>)
    """
    here = ratio.detach()
    held = here.clamp(1 - low, 1 + high) * (ratio / here)
    return torch.minimum(ratio * advantages, held * advantages)


def branch_clip(
    token: Tensor, sequence: Tensor, advantages: Tensor, weight: Tensor | float, token_band: Band, sequence_band: Band
) -> tuple[Tensor, Tensor]:
    """(m·A, m̄·A) of DHPO: m = w·r + (1−w)·s, and m̄ the same of the two ratios each clamped into its own band first.

    Bands are (low, high) distances from 1. The objective is the smaller of the two. Source: arXiv:2601.05607.
    """
    held_token = token.clamp(1 - token_band[0], 1 + token_band[1])
    held_sequence = sequence.clamp(1 - sequence_band[0], 1 + sequence_band[1])
    free = weight * token + (1 - weight) * sequence
    return free * advantages, (weight * held_token + (1 - weight) * held_sequence) * advantages


def row_normalised(x: Tensor, mask: Tensor, flat: float = 0.5) -> Tensor:
    """[B,T] a row's selected entries mapped onto [0, 1] by their minimum and maximum; `flat` if they are all equal.

    0 off the mask. Detach before use as a weight.

    >>> row_normalised(torch.tensor([[9.0, 1.0, 3.0, 2.0]]), torch.tensor([[False, True, True, True]]))
    tensor([[0.0000, 0.0000, 1.0000, 0.5000]])
    """
    if not x.numel():
        return torch.zeros_like(x)
    low = x.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    span = x.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) - low
    spread = torch.isfinite(span) & (span > 0)
    scaled = (x - low) / torch.where(spread, span, torch.ones_like(span))  # 0 on a flat row
    return select(scaled + torch.where(spread, 0.0, flat), mask)


def chi_square_radius(logp_old: Tensor, delta: float) -> Tensor:
    """[B,T] ``√(delta / π_old)``: the step of a ratio that costs π_old·(r−1)² = delta. Source: RIPO, arXiv:2607.10169.

    >>> chi_square_radius(torch.tensor([0.05, 0.2]).log(), 0.05)
    tensor([1.0000, 0.5000])
    """
    return delta**0.5 * (-0.5 * logp_old).clamp(max=40).exp()


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
