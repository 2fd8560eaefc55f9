"""ERPO — environment-side regularisation (arXiv:2608.23311).

RL on a narrow set of prompts erodes what the model knows of other prompts. ERPO does not hold the answers to the
reference; it holds the model's likelihood of the *queries*.

    L = GRPO's without KL + α · mean over query tokens of k3(log p_0 − log p_θ),   α = .01

From GRPO: the KL's place. `rollouts.prompt_mask` marks the query's tokens; the policy's and the reference's log-probs
are needed there, with a gradient. The paper also weighs each query by w = clip(s̄/s, 0, 2), s = −log p_0(query), s̄ the
data set's mean: ``ERPO.but(weights=(QueryWeight(average=…),))``, off here because s̄ is the data's. Released form: per
token; ``level="sequence"`` takes k3 of the query's sum (text of the paper). The mean over rows is ours.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import QueryKL

ERPO = GRPO.but(
    name="erpo",
    source="arXiv:2608.23311",
    regularizers=(QueryKL(alpha=0.01, level="token"),),
    status="our reading",
)
