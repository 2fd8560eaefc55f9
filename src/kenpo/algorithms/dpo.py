"""DPO — direct preference optimization (arXiv:2305.18290), with conservative and robust labels.

The reward model of RLHF and the policy that maximises it under a KL are one: beta times the response's log-ratio to the
reference is a reward. So the preference model is fitted on log-probs directly; nothing is sampled.

    h = Σ_t log(π/π_ref)(chosen) − Σ_t log(π/π_ref)(rejected),   L = −log σ(beta·h),   beta = .1

From the reward model: the score is made of log-probs. Sums over the response, prompts masked, nothing saturates.
`dpo-conservative`: −(1−e)·log σ(beta·h) − e·log σ(−beta·h), labels wrong with share e = .1 (ours). `dpo-robust`: the
unbiased estimate under such flips (arXiv:2403.00409). The likelihood of both responses can fall while h grows.
"""

from kenpo.algorithms.reward_model import REWARD_MODEL
from kenpo.stages import PairLogistic

DPO = REWARD_MODEL.but(name="dpo", source="arXiv:2305.18290", surrogate=PairLogistic(on="logp", beta=0.1))

DPO_CONSERVATIVE = DPO.but(
    name="dpo-conservative", surrogate=PairLogistic(beta=0.1, loss="conservative", smoothing=0.1)
)

DPO_ROBUST = DPO.but(
    name="dpo-robust",
    source="arXiv:2403.00409",
    surrogate=PairLogistic(beta=0.1, loss="robust", smoothing=0.1),
)
