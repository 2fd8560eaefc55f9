"""GAPO — Group-Aware Policy Optimization for output diversity (arXiv:2511.12596).

Where many answers are right, a policy collapses on a few. GAPO pays a valid answer more, the rarer it is in its group.

    R = 1 − (f − 1/L) for one of the L valid answers, f its share of the valid ones; −1 otherwise;   then GRPO

From GRPO: the reward. All valid and equally frequent is a fixed point: no advantage. The paper does not say which
deviation the z-score takes; population and 1e-4 are our reading. Other papers use the name.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import FrequencyAware, GroupZScore

GAPO = GRPO.but(
    name="gapo",
    source="arXiv:2511.12596",
    shaping=(FrequencyAware(),),
    advantage=GroupZScore(eps=1e-4, ddof=0),
    status="our reading",
)
