"""Divergences between two policies, from the log-probs of the sampled token."""

from __future__ import annotations

from torch import Tensor

from kenpo.ops.ratios import saturate


def k1(log_ratio: Tensor) -> Tensor:
    """``−log ρ`` with ρ = q/p at a sample of p: unbiased for KL(p‖q), may be negative."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """``½ log² ρ``: never negative, biased; its gradient is that of the KL on policy."""
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    """``ρ − 1 − log ρ`` with ρ = q/p at a sample of p: unbiased for KL(p‖q), never negative.

    The argument saturates at ±20 in value and gradient, so the result is finite (at most e²⁰ − 21) for any finite
    input. By `expm1`, which keeps the digits near ρ = 1.
    """
    x = saturate(log_ratio)
    return x.expm1() - x
