"""GPRL — General Preference RL, as far as it concerns rewards of several axes (arXiv:2605.18721).

Where a reward is a sum, the axis that spreads most decides. GPRL normalises each axis within the group, then adds.

    A = Σ_k w_k (R_k − mean)/(std + 1e-4);   then GRPO

Axes are the named parts of the reward (a verifier that returns a dict), all of weight 1 unless
``advantage.parts`` and ``advantage.weights`` say otherwise. The paper's axes are the planes of a general preference
model and its weights depend on the prompt; that model, and the monitor that re-weights when one axis dominates, are not
here: their constants are not public. `kenpo.ops.signals.dominance` is the monitor's figure.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import PartsZScore

GPRL = GRPO.but(name="gprl", source="arXiv:2605.18721", advantage=PartsZScore(), regularizers=(), status="our reading")
