"""RLOO — REINFORCE Leave-One-Out (arXiv:2402.14740).

Back to the policy gradient: no ratio, no clip. The baseline of a response is the mean of the *other* responses to its
prompt, which does not depend on it, so the gradient is unbiased.

    J = (1/N) Σ_i A_i log π(y_i),   A_i = R_i − mean of the others = G/(G−1) · (R_i − mean R)

The log-prob is summed over the response. The paper's reward includes −β times the log-ratio to a reference; it is off
here. The loss value follows the log-probs and is no measure of progress. For more than one update per batch, TRL and
verl put this advantage into a clipped token ratio: ``RLOO.but(ratio=TokenRatio(), surrogate=Clip())``.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import LeaveOneOut, ScoreFunction, SequenceSum

RLOO = GRPO.but(
    name="rloo",
    source="arXiv:2402.14740",
    advantage=LeaveOneOut(),
    ratio=None,
    surrogate=ScoreFunction(),
    regularizers=(),
    aggregate=SequenceSum(),
)
