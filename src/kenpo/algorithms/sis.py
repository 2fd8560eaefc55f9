"""SIS — Selective Importance Sampling (arXiv:2607.04728).

A stale token need not be reweighted if it might as well have come from the current policy. SIS runs a rejection test on
each token: those that pass count as on-policy, weight 1; the others keep their importance ratio and clip.

    M = max over π_old's top K of π_θ/π_old,  pass with probability min(1, r/M) (never outside the top K)
    J = GRPO's with r := π/sg[π] where passed

From GRPO: the ratio, no KL. Any ratio may stand behind it (``base``), any surrogate after it. The draws are hashes of
the token, so a result depends on neither order nor cut. Needs the log-probs of the same K ids under both policies
(the authors' K: 100). The corrected weight is biased: with q = (.5, .3, .2), p = (.4, .4, .2) its expectation is .96.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import SelectiveRatio, TokenRatio

SIS = GRPO.but(
    name="sis",
    source="arXiv:2607.04728",
    status="our reading",
    ratio=SelectiveRatio(base=TokenRatio()),
    regularizers=(),
)
