"""Proximal policies that stand in for a π_old that was not stored. Source: Missing Old Logits, arXiv:2605.12070."""

from __future__ import annotations

import torch
from torch import Tensor


def ewma(average: Tensor, weights: Tensor, decay: float) -> Tensor:
    """``decay·average + (1 − decay)·weights``: one step of PPO-EWMA's proximal weights (Hilton et al. 2021).

    >>> ewma(torch.tensor([1.0]), torch.tensor([0.0]), 0.9)
    tensor([0.9000])
    """
    return torch.lerp(weights, average, decay)


def interpolated(logp: Tensor, logp_sampler: Tensor, share: float) -> Tensor:
    """``(1 − share)·log μ + share·log π_θ``: a log-linear proximal policy (A-3PO). π_θ's part is detached."""
    return (1 - share) * logp_sampler + share * logp.detach()


def equivalent_bounds(low: float, high: float, share: float) -> tuple[float, float]:
    """What clipping π_θ/π_prox at [1 − low, 1 + high] means for π_θ/μ when π_prox is `interpolated`: the same clip at
    ``(1 − low)^(1/(1−share))`` and ``(1 + high)^(1/(1−share))``, because π_θ/π_prox = (π_θ/μ)^(1−share)."""
    return (1 - low) ** (1 / (1 - share)), (1 + high) ** (1 / (1 - share))
