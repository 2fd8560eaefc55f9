"""Tail and range expectations of scores, and quantiles that are tracked from batch to batch."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import row_mean


def risk_utility(z: Tensor, low: Tensor, high: Tensor, omega: float) -> Tensor:
    """``−(1+ω)(q_a − z)⁺ + (z − q_a)⁺ − (z − q_b)⁺ + q_a − q_b``: concave, never positive, flat above q_b.

    The score-function weight of ``(1+ω)∫_{R ≤ q_a} R dF + ∫_{q_a}^{q_b} R dF``; slopes 1+ω, 1, 0.
    Source: RiskPO, arXiv:2510.00911.
    """
    return -(1 + omega) * (low - z).clamp(min=0) + (z - low).clamp(min=0) - (z - high).clamp(min=0) + low - high


def risk_utility_released(
    z: Tensor, low: Tensor, high: Tensor, *, alpha: float, beta: float, mix: float, baseline: bool
) -> Tensor:
    """``(mix·tail + range)/(mix + 1)``, each divided by its mass (+1e-6); `baseline` adds q_a − q_b to the range.

    Another parametrisation than `risk_utility`: mix corresponds to 1 + ω = mix·(beta − alpha)/alpha.
    Source: RiskPO's released code.
    """
    inside = (z - low).clamp(min=0) - (z - high).clamp(min=0) + ((low - high) if baseline else 0.0)
    tail = -(low - z).clamp(min=0) / (alpha + 1e-6)
    return (mix * tail + inside / (beta - alpha + 1e-6)) / (mix + 1)


def quantile_step(quantiles: Tensor, levels: Tensor, scores: Tensor, lr: float) -> Tensor:
    """``q + lr·(level − share of scores below q)``; unchanged without scores.

    >>> quantile_step(torch.tensor([1.0, 4.0]), torch.tensor([0.2, 0.8]), torch.tensor([0.0, 2.0, 3.0, 9.0]), 0.1)
    tensor([0.9950, 4.0050])
    """
    if not len(scores):
        return quantiles
    below = (scores.unsqueeze(0) < quantiles.unsqueeze(-1)).to(quantiles.dtype)
    below = row_mean(below, torch.ones_like(below, dtype=torch.bool))
    return quantiles + lr * (levels - below)


def quantile_mixture(scores: Tensor, levels: Tensor, weights: Tensor) -> Tensor:
    """``Σ weight·quantile(level)``: a figure of how bad the bad cases are. Linear interpolation.

    Not a training signal: a point quantile of discrete scores has gradient 0 almost everywhere.

    >>> quantile_mixture(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.5]))
    tensor(0.5000)
    """
    return (weights * torch.quantile(scores, levels)).sum()


def sum_mean_credit(advantage: Tensor, scores: Tensor, lead: Tensor) -> Tensor:
    """[bundles, questions] ``A·lead/Σ lead`` over a bundle, lead = score − question mean; equal shares if |Σ| ≤ 1e-6.

    May turn a sign where the sum is negative. Source: RiskPO's released code.
    """
    total = lead.sum(-1, keepdim=True)
    even = total.abs() <= 1e-6
    share = torch.where(even, torch.full_like(lead, 1 / scores.shape[-1]), lead / torch.where(even, 1.0, total))
    return advantage.unsqueeze(-1) * share
