"""MaD-RL — rewards that match a group's answers to a target distribution.

A task may ask for a distribution of answers rather than one. Each answer earns minus the slope of a divergence between
target p and group frequency f.

    reverse KL: log p − log f;   forward KL: p/f − 1;   L2: p − f;   Jensen-Shannon: ½ (log m − log f);   then GRPO

From GRPO: the reward. The divergences are exact; floor 1e-6, −1 for an invalid answer, KL .04 and clip .2 are a third
party's protocol, and which divergence is the default is ours. f is estimated from the group: in small groups all but L2
are biased.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import TargetDistribution

MAD_RL = GRPO.but(name="mad_rl", source="MaD-RL", shaping=(TargetDistribution(),), status="our reading")
MAD_RL_L2 = MAD_RL.but(name="mad_rl-l2", shaping=(TargetDistribution("l2"),))
MAD_RL_FORWARD_KL = MAD_RL.but(name="mad_rl-forward-kl", shaping=(TargetDistribution("forward_kl"),))
MAD_RL_JSD = MAD_RL.but(name="mad_rl-jsd", shaping=(TargetDistribution("jsd"),))
