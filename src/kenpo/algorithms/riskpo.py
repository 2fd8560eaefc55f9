"""RiskPO — Risk-based Policy Optimization (arXiv:2510.00911).

A mean reward is raised most easily where the policy is good already. RiskPO looks at the score of a bundle of questions
and pays for its bad (1+ω) and middling (1) outcomes only.

    A(z) = −(1+ω)(q_α − z)⁺ + (z − q_α)⁺ − (z − q_β)⁺ + q_α − q_β,   q ← q + lr·(level − share of z below q)
    J = mean over responses of min(s A, clip(s) A),   s the sequence ratio;   α .2, β .8, five questions, lr .1

From GSPO: the advantage, and a clip of .2 (the paper gives no number: ours). ω = .5 is a third party's. `riskpo-masses`
is the released code's other parametrisation (each part over its probability, mix 1.5) under a token ratio and mean;
that code writes its tracked quantiles where no later batch reads them, here they are tracked in both, and it pairs
responses as they are stored (``advantage.pairing=stored``), which here no order of rows may change. A mixture of point
quantiles, as others describe RiskPO, has no gradient on discrete rewards: `kenpo.ops.risk.quantile_mixture` is a figure
only.
"""

from kenpo.algorithms.gspo import GSPO
from kenpo.stages import Clip, QuantileRisk, TokenMean, TokenRatio

RISKPO = GSPO.but(
    name="riskpo",
    source="arXiv:2510.00911",
    advantage=QuantileRisk(),
    surrogate=Clip(low=0.2, high=0.2),
    status="our reading",
)
RISKPO_MASSES = RISKPO.but(
    name="riskpo-masses",
    advantage=QuantileRisk(form="masses"),
    ratio=TokenRatio(),
    aggregate=TokenMean(),
)
