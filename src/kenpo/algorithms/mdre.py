"""tlm-DRE — turn-level multiscale density ratio estimation (arXiv:2609.16760).

An agent's failed trajectory differs from an expert's in a few turns; the many turns that any policy gets right only
blur the contrast. Turns that the reference already takes with confidence weigh less.

    w = Σ_t om_t·log(π/π_ref),   om = .2 on turns with exp(mean log π_ref) > .9, else 1
    L = e^w(rejected) − C·w(chosen),   C = exp( Σ_t (1 − om_t)·log π_ref(chosen) )

From DPO: the surrogate. Chosen is the group's response of higher reward, `rollouts.turn` numbers the turns. Taken
literally C vanishes on long trajectories (ten confident turns of 100 tokens at .95: e^−41) and the chosen side stops
training; ``surrogate.chosen_factor=length_normalised`` (ours) or ``one`` keep it. The exponent is held at ±20 (ours).
"""

from kenpo.algorithms.dpo import DPO
from kenpo.stages import TurnDensityRatio

MDRE = DPO.but(
    name="mdre",
    source="arXiv:2609.16760",
    surrogate=TurnDensityRatio(low=0.2, high=1.0, pivot=0.9, chosen_factor="literal"),
)
