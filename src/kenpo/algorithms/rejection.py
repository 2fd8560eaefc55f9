"""Rejection — tokens or responses dropped by statistics of the sampler mismatch (verl's ``rollout_rs``).

Instead of weighing by ρ = π_old/μ, drop what was sampled from too different a policy. A rule bounds a statistic (k1, k2
or k3 of ρ) per token, or its sum, mean or maximum over a response; all rules must pass.

    J = (1/Σ K n) Σ_i Σ_t K · min(r A, clip(r, 1−ε, 1+ε) A),   K = 1[every rule passes]

From TIS: another weight, and dropped tokens leave the denominator as in verl (slime keeps them:
``aggregate.over=all``). The rule here is a mean k3 of at most .01, an estimate of KL(μ‖π_old), from verl's typical
.001-.01. ``seq_mean_k1`` in .999-1.001 is its Geo-RS, whose band acts on μ/π_old (``band_on="inverse_rho"``). Kept
tokens carry no ρ; add ``--with truncated_is`` for that.
"""

from kenpo.algorithms.tis import TIS
from kenpo.stages import Rejection, Rule, TokenMean

REJECTION = TIS.but(
    name="rejection",
    source="verl",
    weights=(Rejection(rules=(Rule("seq_mean_k3", upper=0.01),)),),
    aggregate=TokenMean(over="kept"),
)
