"""OPSA — on-policy distillation without its teacher (arXiv:2608.31046): the control for every claim of a teacher.

Most of what distillation on sampled tokens gains sits in the least likely of them, and one fixed negative advantage
there does about as well. So no teacher and no reward are asked: unlikely tokens are pushed down.

    A = −½ − ½·(H − H_min)/(H_max − H_min) on the ⌊.2·N⌋ tokens of lowest log π_old, 0 elsewhere;  Clip .2/.2

From OPD: the advantage, and a weight that takes the other tokens out of the response means as well (responses
without a chosen token stay counted). The cut is the
minibatch's, as are the N tokens; the authors' code cuts within one worker. `opsa-fixed`: A = −.5 on those tokens.
"""

from kenpo.algorithms.opd import OPD
from kenpo.stages import FixedNegative, LeastLikely, SequenceMean

OPSA = OPD.but(
    name="opsa",
    source="arXiv:2608.31046",
    status="our reading",
    advantage=FixedNegative(share=0.2, adaptive=True),
    weights=(LeastLikely(share=0.2),),
    aggregate=SequenceMean(over="kept_tokens"),
)

OPSA_FIXED = OPSA.but(name="opsa-fixed", advantage=FixedNegative(share=0.2, value=-0.5, adaptive=False))
