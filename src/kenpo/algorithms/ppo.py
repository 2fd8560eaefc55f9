"""PPO with a critic, as RLHF uses it (arXiv:1707.06347; GAE, arXiv:1506.02438).

A second model V predicts what a response will still earn, so every token is judged by what came of it and one sample
per prompt is enough. The critic learns beside the policy.

    r_t = −β (log π_old − log π_ref) + [outcome on the last token]
    δ_t = r_t + γ V_{t+1} − V_t,   A_t = δ_t + γλ A_{t+1},   R = A + V
    L = −mean over tokens of min(r A, clip(r, 1−ε, 1+ε) A)  +  c · ½ mean max((V − R)², (Vc − R)²)

A is whitened over the batch after R was taken. The numbers are those of TRL's PPO: γ 1, λ .95, ε .2, values held within
.2, c .1, β .05. The KL stands in the reward; in the loss as well (``--with kl_to_reference``) it would be counted twice
and is refused without ``advantage.both``. `ppo-ptx` adds −27.8 · the mean log π over supervised rows of the batch
(InstructGPT, arXiv:2203.02155).
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import GAE, Clip, SupervisedNLL, TokenMean, ValueLoss

PPO = GRPO.but(
    name="ppo",
    source="arXiv:1707.06347",
    advantage=GAE(gamma=1.0, lam=0.95, whiten=True, kl=0.05),
    surrogate=Clip(low=0.2, high=0.2),
    regularizers=(ValueLoss(clip=0.2, coef=0.1),),
    aggregate=TokenMean(),
)

PPO_PTX = PPO.but(name="ppo-ptx", source="arXiv:2203.02155", regularizers=(*PPO.regularizers, SupervisedNLL(coef=27.8)))
