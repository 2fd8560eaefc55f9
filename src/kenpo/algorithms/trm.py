"""TRM — Trust Region Masking (arXiv:2512.23075).

For long responses token-wise clipping gives no monotone improvement: one token far outside spoils the bound for all.
TRM accepts or rejects whole responses by their worst token.

    J = (1/N) Σ_i M_i A_i Σ_t r_t,   r = π_θ/μ,   M_i = 1[ max_t D(μ‖π_θ) ≤ δ ]  (and mean_t D ≤ δ_avg)

From GRPO: the ratio's anchor, no clip, sums over tokens, and a mask per response; rejected responses stay in N, and
advantages are those of the full group. `trm` is the published max form at δ = .05, which a replication found to fail on
long outputs: there add the average criterion, `trm-both` (.001), or use it alone. The exact KL needs the whole
vocabulary (``estimator="exact"``, `trm-exact`); from samples we take the largest k2 and the mean k3, detectors and not
bounds: that choice is the later version's as others report it. What a rejected response does to N is not established:
`trm-kept` divides by the accepted ones, as verl does in a token mean. The sum over tokens has no 1/n: ``SequenceMean``
is the length-normalised form.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Linear, SequenceKLMask, SequenceSum, TokenRatio

TRM = GRPO.but(
    name="trm",
    source="arXiv:2512.23075",
    weights=(SequenceKLMask(max=0.05, mean=None),),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Linear(),
    regularizers=(),
    aggregate=SequenceSum(),
    status="our reading",
)

TRM_BOTH = TRM.but(name="trm-both", weights=(SequenceKLMask(max=0.05, mean=0.001),))

TRM_KEPT = TRM.but(name="trm-kept", aggregate=SequenceSum(over="kept"))

TRM_EXACT = TRM.but(name="trm-exact", weights=(SequenceKLMask(max=0.05, estimator="exact"),), status="paper")
