"""SimPO — simple preference optimization with a reference-free reward (arXiv:2405.14734).

DPO's reward is a log-ratio to a reference, while generation follows the average log-prob. SimPO takes the average
log-prob itself as the reward, needs no reference model, and asks for a target margin.

    z = beta·(mean_t log π(chosen) − mean_t log π(rejected) − g),   L = −log σ(z),   beta = 2, g = gamma/beta = .25

From DPO: no reference, the token mean, the margin. The numbers are the released trainer's defaults; its settings per
model: beta 2 to 10, g .1 to .8. ``surrogate.gamma`` gives the margin in units of z, as the paper prints it (set
``surrogate.gamma_beta_ratio`` to 0 then). Nothing holds the policy near where it started but a small learning rate.
"""

from kenpo.algorithms.dpo import DPO
from kenpo.stages import PairLogistic

SIMPO = DPO.but(
    name="simpo",
    source="arXiv:2405.14734",
    surrogate=PairLogistic(on="logp", beta=2.0, reference=False, normalise=True, gamma_beta_ratio=0.25),
)
