"""VAPO — Value-based Augmented Proximal Policy Optimization (arXiv:2504.05118).

PPO for long chains of thought. One λ can't serve answers of 50 and of 8,000 tokens, and a critic that bootstraps from
itself learns a late reward slowly: so the critic learns from whole returns, and the policy's λ grows with the answer.

    λ_critic = 1,   λ_policy = max(0, 1 − 1/(.05 n)),   L = L_PPO (clip .2/.28) + .1 · mean NLL of right answers

From `ppo`: both λ, DAPO's wider clip, the NLL, no KL. The critic is first trained alone on a fixed policy
(``--critic-warmup``). Answers of up to 20 tokens get λ = 0. "Right" is a raw outcome above 0.
"""

from kenpo.algorithms.ppo import PPO
from kenpo.stages import GAE, Clip, PositiveNLL, ValueLoss

VAPO = PPO.but(
    name="vapo",
    source="arXiv:2504.05118",
    advantage=GAE(gamma=1.0, critic_lam=1.0, adaptive=0.05, whiten=True),
    surrogate=Clip(low=0.2, high=0.28),
    regularizers=(ValueLoss(clip=0.2, coef=0.1), PositiveNLL(coef=0.1)),
)
