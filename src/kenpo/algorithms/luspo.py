"""LUSPO — Length-Unbiased Sequence Policy Optimization (arXiv:2602.05261).

GSPO's sequence ratio averages over the response, so a token of a long response moves less than one of a short response.
LUSPO multiplies each response's term by its length, which cancels the division.

    J = (1/N) Σ_i n_i · min(s_i A_i, clip(s_i, 1−2e-3, 1+2.5e-3) A_i)

From GSPO: token sums instead of token means, and wider clips. The gradient is n_i times GSPO's, row by row: the norm
grows with the typical length, so the learning rate and gradient clip of GSPO do not carry over. TRL before 08/2026
multiplied by n_i²/T wherever its loss matrix was [B,T].
"""

from kenpo.algorithms.gspo import GSPO
from kenpo.stages import Clip, SequenceSum

LUSPO = GSPO.but(
    name="luspo",
    source="arXiv:2602.05261",
    surrogate=Clip(low=2e-3, high=2.5e-3),
    aggregate=SequenceSum(),
)
