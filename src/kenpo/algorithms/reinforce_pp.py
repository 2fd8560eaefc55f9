"""REINFORCE++ and REINFORCE++-baseline (arXiv:2501.03262).

Statistics of a small group are noisy and push easy prompts hard. REINFORCE++ normalises over the whole rollout batch
instead; with several samples per prompt, the "-baseline" form first takes off the group's mean.

    A = (x − mean)/√(var + 1e-8) over all trained tokens,   x = R  or  x = R − mean of the group;   PPO clip, token mean

From GRPO: the advantage, the token mean, no KL in the loss. REINFORCE++ needs no group. ``advantage.beta`` > 0 puts the
KL where its paper has it, in the reward: each token earns −β (log π_old − log π_ref), the outcome stands on the last,
and x is what is still to come: `reinforce_pp-kl`, β .01 as OpenRLHF's default. The baseline form has its KL in the
loss: ``--with kl_to_reference``. It is not an exponential moving average, as some notes have it. Every response's
outcome counts once per token.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Clip, GlobalWhiten, TokenMean

REINFORCE_PP = GRPO.but(
    name="reinforce_pp",
    source="arXiv:2501.03262",
    advantage=GlobalWhiten(eps=1e-8),
    surrogate=Clip(low=0.2, high=0.2),
    regularizers=(),
    aggregate=TokenMean(),
)

REINFORCE_PP_KL = REINFORCE_PP.but(name="reinforce_pp-kl", advantage=GlobalWhiten(eps=1e-8, beta=0.01))
REINFORCE_PP_BASELINE = REINFORCE_PP.but(
    name="reinforce_pp_baseline", advantage=GlobalWhiten(eps=1e-8, baseline="group")
)
