"""RLCR — Reinforcement Learning with Calibration Rewards (arXiv:2507.16806).

A reward for right answers pays a confident guess as well as knowledge. RLCR asks for a confidence beside the answer and
takes off its squared error.

    R = c − (q − c)²,   c = 1 if right else 0, q in [0, 1] the stated confidence;   then GRPO without KL

For a chance p of being right the best q is p and earns p², which rises with p. The verifier gives q as the reward part
``confidence``. The released code was not read: no format reward (``shaping.calibration.format_weight``), −1 without a
valid confidence and GRPO's other numbers are our reading.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Calibration

RLCR = GRPO.but(name="rlcr", source="arXiv:2507.16806", shaping=(Calibration(),), regularizers=(), status="our reading")
