"""SAPO — Soft Adaptive Policy Optimization (arXiv:2511.20347).

The hard clip becomes a smooth gate on the token ratio, a little narrower where the advantage is negative: tokens fade
out instead of falling off an edge.

    f(r) = (4/τ) σ(τ(r−1)),   J = (1/N) Σ_i (1/n_i) Σ_t f(r_it) A_i,   τ = 1.0 where A > 0, else 1.05

The coefficient of ∇log π is r·sech²(τ(r−1)/2)·A: it peaks near r ≈ 2, not at 1.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import SoftGate

SAPO = GRPO.but(
    name="sapo",
    source="arXiv:2511.20347",
    surrogate=SoftGate(tau_pos=1.0, tau_neg=1.05),
    regularizers=(),
)
