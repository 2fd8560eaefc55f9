"""MiniRL — the minimal stable recipe of "Stabilizing Reinforcement Learning with LLMs" (arXiv:2512.01374).

A token objective is a first-order expansion of the sequence objective, good only while the engine mismatch and the
staleness are both small. MiniRL keeps both factors in one weight, π_θ/μ, and gates on the staleness alone.

    J = (1/N) Σ_i Σ_t M sg[min(π_θ/μ, 5)] A log π_θ,   A = R − mean
    M = 0 if (A > 0 and r > 1.27) or (A < 0 and r < .8), else 1;   r = π_θ/π_old

From CISPO: centred advantages, the ratio's anchor, the gate, sums over tokens (a length mean is stable but worse). The
weight on π_θ/μ and the gate on π_θ/π_old are meant so: the mismatch is counted once. `mini_rl-old` is a public
implementation's π_old/μ, which leaves the staleness out of the weight; equal only while r = 1.
"""

from kenpo.algorithms.cispo import CISPO
from kenpo.stages import DetachedClip, GroupCentred, RatioGate, ScoreFunction, SequenceSum, TokenRatio, TruncatedIS

MINI_RL = CISPO.but(
    name="mini_rl",
    source="arXiv:2512.01374",
    advantage=GroupCentred(),
    weights=(RatioGate(low=0.2, high=0.27),),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=DetachedClip(cap=5.0),
    aggregate=SequenceSum(),
)

MINI_RL_OLD = MINI_RL.but(
    name="mini_rl-old",
    source="public implementations of arXiv:2512.01374",
    weights=(RatioGate(low=0.2, high=0.27), TruncatedIS(cap=5.0)),
    ratio=None,
    surrogate=ScoreFunction(),
    status="our reading",
)
