"""Golden-GRPO (GRIN) — knowledge injection by one golden answer per group (arXiv:2608.25243).

The model writes one answer with the document in its context; it joins the group of those written without. Knowledge the
policy lacks enters as the golden answer's likelihood rises, and stops as soon as its own answers are as good.

    own token: min(r A, clip(r) A);   golden token: A log π, no ratio, no clip;   A = R − mean of all members;   KL 5

From GRPO: no standard deviation, the golden answer's term (``origin`` 2), a deliberately huge KL to the stage before.
Unlike LUFFY's, its coefficient does not vanish with p: at p = .001 and A = 16/9 it is 1.78, LUFFY's .0174.
Ours: clip .2, token mean, k3. A golden answer below its group's mean is unlearnt without bound, as published;
``surrogate.floor`` 0 stops that.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Clip, GoldenAnswer, GroupCentred, KLToReference, TokenMean

GRIN = GRPO.but(
    name="grin",
    source="arXiv:2608.25243",
    status="our reading",
    advantage=GroupCentred(),
    surrogate=GoldenAnswer(own=Clip(low=0.2, high=0.2), floor=None),
    regularizers=(KLToReference(beta=5.0),),
    aggregate=TokenMean(),
)
