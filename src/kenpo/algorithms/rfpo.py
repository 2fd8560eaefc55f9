"""RFPO — Unlocking the Critic (arXiv:2609.37119).

A critic that was trained once and calibrated can stand in for the verifier: its value at the last token is the outcome,
also of responses that were cut off, and its values are the baseline. It never learns again.

    r̂ = 1[V(last) − b(length) > τ],   A_t = r̂ − V_t, whitened over the batch;   PPO clip .2, one update per batch

From `ppo`: the verdict, γ = λ = 1, no KL, a critic without a loss. τ and b are fitted once on labelled rollouts
(`kenpo.ops.verdict.calibrate`); τ .5215 belongs to a limit of 5,120 tokens, and b is 0 until it is given. With
``shaping.critic_verdict.labels`` a share of the rollouts keeps its verified outcome. The gap: how the length offsets of
right and wrong rollouts become one b is told in words only; half the sum of both classes' deviations is our reading. V
is that before the token, as in `ppo`: a baseline may not depend on the token that it judges.
"""

from kenpo.algorithms.ppo import PPO
from kenpo.stages import GAE, CriticVerdict

RFPO = PPO.but(
    name="rfpo",
    source="arXiv:2609.37119",
    shaping=(CriticVerdict(tau=0.5215),),
    advantage=GAE(gamma=1.0, lam=1.0, whiten=True),
    regularizers=(),
    status="our reading",
    updates=1,
)
