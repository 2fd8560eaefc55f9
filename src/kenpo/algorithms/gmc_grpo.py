"""GMC-GRPO — group-mass capping (arXiv:2610.01896).

Clipping each trajectory's ratio on its own destroys the relative weights inside a group. GMC scales the whole group
down by one factor where the sum of its ratios exceeds a cap.

    J = (1/N) Σ_i (1/n_i) Σ_t sg[w_i] A_i log π_θ,   w_i = r_i · min(1, C / Σ_j r_j),   r_i = Π_t π_θ/π_old

From GRPO: the group's weight on a score function in place of ratio and clip; no KL. Known from summaries only: the cap
(2 here), the detached form and the mean are ours, and so is that the mass is not divided by G: on policy it is G, so
that with G > C all weights are C/G. Whole groups must stand in one minibatch (two phases).
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import GroupMass, ScoreFunction

GMC_GRPO = GRPO.but(
    name="gmc_grpo",
    source="arXiv:2610.01896",
    weights=(GroupMass(cap=2.0),),
    ratio=None,
    surrogate=ScoreFunction(),
    regularizers=(),
    status="our reading",
)
