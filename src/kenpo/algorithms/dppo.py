"""DPPO — Divergence PPO (arXiv:2602.04879), with the binary total variation, the binary KL and top-K buckets.

PPO's clip measures trust by the ratio: it blocks a rare token that went from .001 to .01 and lets a common one go from
.9 to .6. DPPO measures the divergence of the distribution instead, against μ, the policy that sampled.

    J = (1/Σ n_i) Σ_i Σ_t M r A,   r = π_θ/μ,   A = R − mean
    M = 0 where the token moves outward (A > 0, r > 1 or A < 0, r < 1) and D(μ‖π_θ) > δ, else 1

From Dr. GRPO: the ratio's anchor, a mask for the clip, a token mean (masked tokens stay counted), no cap on r. δ = .15
for TV is the stability study's, .2 the scaling study's (with C = 5); .05 for KL. It is also stated as a constrained
programme; the paper's method is this mask. Top-K: buckets are the sampler's K (20) likeliest tokens with the sampled
one, and the rest; the release replaces the K-th instead. Feed the sampler's recorded log-probs: with log-probs scored
again and one update, every r is 1 and the mask does nothing (a warning says so).
"""

from kenpo.algorithms.dr_grpo import DR_GRPO
from kenpo.stages import DivergenceMask, Linear, TokenMean, TokenRatio

DPPO = DR_GRPO.but(
    name="dppo",
    source="arXiv:2602.04879",
    weights=(DivergenceMask(kind="tv", threshold=0.15),),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Linear(),
    aggregate=TokenMean(),
)

DPPO_KL = DPPO.but(name="dppo_kl", weights=(DivergenceMask(kind="kl", threshold=0.05),))

DPPO_TOPK = DPPO.but(name="dppo_topk", weights=(DivergenceMask(kind="tv", threshold=0.15, buckets="top_k"),))
