"""SPO — Single-stream Policy Optimization (arXiv:2509.13232).

A group spends its samples on one baseline and waits for its longest member. SPO remembers instead how often each prompt
was solved and takes one sample of it.

    A = r − v, then (A − mean)/std over the batch;   v = α/(α + β) from before the batch
    α ← ρα + r,  β ← ρβ + 1 − r,   ρ = 2^(−D/.06) in [.875, .96];   clip .2/.28, dual clip 10, token mean

D is how far the policy has moved on the prompt's previous response (`rollouts.drift`). Prompts near one half are drawn
more often: weight √(v(1 − v)) + .05, the released code's; the paper also divides by a power of the effective count.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import BetaTracker, DualClip, TokenMean

SPO = GRPO.but(
    name="spo",
    source="arXiv:2509.13232",
    advantage=BetaTracker(),
    surrogate=DualClip(low=0.2, high=0.28, dual=10.0),
    regularizers=(),
    aggregate=TokenMean(),
)
