"""GRPO — Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300).

The root of the family: the critic is replaced by the group. Advantages are z-scores within a prompt's group; the token
ratio is clipped as in PPO; each response's tokens are averaged, then the responses; a k3 estimate of the KL to the
reference stands in the loss.

    J = (1/N) Σ_i (1/n_i) Σ_t [ min(r A, clip(r, 1−ε, 1+ε) A) − β k3 ]
"""

from kenpo.algorithm import Algorithm
from kenpo.stages import Clip, GroupZScore, KLToReference, SequenceMean, TokenRatio

GRPO = Algorithm(
    "grpo",
    "arXiv:2402.03300",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    surrogate=Clip(low=0.2, high=0.2),
    regularizers=(KLToReference(beta=0.04),),
    aggregate=SequenceMean(),
)
