"""Missing Old Logits — an averaged proximal policy where π_old was not stored (arXiv:2605.12070; PPO-EWMA).

With asynchronous sampling the trainer's log-probs at the sampler's version are often gone. Then one ratio π_θ/μ has to
serve two purposes, and both thresholds act on the product. An exponential average of the weights gives a third policy
that separates them again.

    J = (1/Σ n_i) Σ_i Σ_t sg[π_prox/μ] · min(q A, clip(q, 1−ε, 1+ε) A),   q = π_θ/π_prox
    φ ← b φ + (1−b) θ after each step

From TIS: π_prox in π_old's place in the correction and in the ratio (rollouts.logp_prox), no truncation. This is the
plain PPO-EWMA (Hilton et al. 2021); what the paper's revision changes is not known. Averaging the weights and scoring
with them is the loop's (`kenpo.ops.proximal.ewma`). Interpolating log-probs instead only moves the clip's bounds:
`kenpo.ops.proximal.equivalent_bounds`. If π_old can be had exactly (version snapshots), plain `tis` needs none of this.
"""

from kenpo.algorithms.tis import TIS
from kenpo.stages import TokenRatio, TruncatedIS

MISSING_OLD_LOGITS = TIS.but(
    name="missing_old_logits",
    source="arXiv:2605.12070",
    weights=(TruncatedIS(cap=None, anchor="prox"),),
    ratio=TokenRatio(anchor="prox"),
    status="our reading",
)
