"""ReCo — variance ratios and rare responses instead of importance ratios (arXiv:2607.26862).

Importance ratios keep pushing tokens that are already nearly certain. ReCo weighs a token by how the variance p(1−p) of
its choice has changed, which fades as p saturates, and a response by the inverse of its likelihood.

    ∇J = (1/N) Σ_i Σ_t u_i v_it A_i ∇log π,   v = p(1−p)/(p_old(1−p_old)),   u_i = 1/π̄_old(y_i),   both constant

From RLOO: z-scores, two weights. From .9 to .95 the weight is .528 where the ratio is 1.056. Ours: the z-score;
π̄ is the geometric mean of the token probabilities (a product would overflow); no clip of u or v, no KL.
"""

from kenpo.algorithms.rloo import RLOO
from kenpo.stages import GroupZScore, InverseLikelihood, VarianceRatio

RECO = RLOO.but(
    name="reco",
    source="arXiv:2607.26862",
    status="our reading",
    advantage=GroupZScore(),
    weights=(VarianceRatio(), InverseLikelihood()),
)
