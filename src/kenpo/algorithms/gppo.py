"""GPPO — Gradient-Preserving clipping Policy Optimization (Klear-Reasoner, arXiv:2508.07629).

A clip takes all gradient from exactly the tokens that explore or go wrong. GPPO keeps the clip's value and lets a
bounded gradient through: that of a ratio standing at the bound.

    J = (1/Σ n) Σ min(r A, clip(sg[r], 1−.2, 1+.28)·(r/sg[r]) A);  coefficient 1.28 A, .8 A beyond the bounds, else r A

From DAPO's loss: the gradient beyond the clip. Against CISPO: the same for A > 0 above the cap, but .8 A instead of r A
below the floor where A < 0, and r A instead of the cap's where A < 0 above it. The authors' recipe adds a dual clip of
10 (`gppo-dual`: no gradient where A < 0 and r > 10) and an auxiliary loss on correct responses, not part of this entry.
Another "GPPO" (Generalized PPO) is unrelated.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import GradientPreservingClip, TokenMean

GPPO = GRPO.but(
    name="gppo",
    source="arXiv:2508.07629",
    surrogate=GradientPreservingClip(low=0.2, high=0.28),
    regularizers=(),
    aggregate=TokenMean(),
)

GPPO_DUAL = GPPO.but(name="gppo-dual", surrogate=GradientPreservingClip(low=0.2, high=0.28, dual=10.0))
