"""TIS — Truncated Importance Sampling (Yao et al., fengyao.notion.site/off-policy-rl).

The engine that samples and the trainer that scores give the same tokens different probabilities, so "on-policy" batches
are off-policy. Each token is weighed by ρ = π_old/μ, cut from above so that a few tokens can't dominate.

    J = (1/Σ n_i) Σ_i Σ_t min(ρ, C) · min(r A, clip(r, 1−ε, 1+ε) A),   ρ = π_old/μ,  r = π_θ/π_old

From DAPO without its filters: clip .2/.2 and the weight. C = 2 is slime's; TRL takes 3, verl recommends 2-10 at
sequence level. `tis-sequence` weighs a response by the product of its ρ. Token weights are biased (the prefix is not
corrected), sequence weights are unbiased only without a cap. ``normalise`` divides by the minibatch's mean weight
(verl, slime). As a correction it composes with any algorithm whose ratio is anchored at π_old: ``--with truncated_is``.
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import Clip, TruncatedIS

TIS = DAPO.but(
    name="tis",
    source="fengyao.notion.site/off-policy-rl",
    selection=(),
    shaping=(),
    surrogate=Clip(low=0.2, high=0.2),
    weights=(TruncatedIS(cap=2.0),),
)

TIS_SEQUENCE = TIS.but(name="tis-sequence", weights=(TruncatedIS(cap=2.0, level="sequence"),))
