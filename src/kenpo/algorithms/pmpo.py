"""PMPO — power-mean policy optimization (arXiv:2601.22521).

GRPO takes the arithmetic mean of token ratios, GMPO the geometric one: two points of the power mean. PMPO chooses the
exponent for each response: where many tokens were clipped it moves toward the cautious geometric mean.

    J = (1/N) Σ_i A_i (mean_t r'^p_i)^(1/p_i),   r' = GMPO's clipped ratios,   p_i in [0, 1], a constant

From GMPO: another mean. Our reading: with f the clipped share, p solves ESS(p) = (1−f)·ESS(1) + f·n, where
ESS(p) = (Σ r'^p)²/Σ r'^2p; equal ratios give p = 1. The paper is known to set the effective sample size from the clip
share; its map, its clip and its code are not public. ``ratio.p`` as a number fixes the exponent (`pmpo-half`: ½): on a
test batch p = 1, ½, →0 give −.11902, −.11611, −.11328, the last being GMPO. Two later papers reuse the name or the mean
(arXiv:2605.04066, arXiv:2605.12058) with other rules.
"""

from kenpo.algorithms.gmpo import GMPO
from kenpo.stages import LogClip, PowerRatio

PMPO = GMPO.but(
    name="pmpo",
    source="arXiv:2601.22521",
    status="our reading",
    ratio=PowerRatio(p="ess", bound=LogClip(low=0.4, high=0.4)),
)

PMPO_HALF = PMPO.but(name="pmpo-half", ratio=PowerRatio(p=0.5, bound=LogClip(low=0.4, high=0.4)))
