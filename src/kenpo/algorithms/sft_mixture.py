"""SFT mixture: GRPO on the policy's own responses, cross-entropy on an expert's, in one step. The baseline for LUFFY,
GRIN and RePO.

The simplest use of an expert's trace is to imitate it. The trace enters no group statistic and no count of the
policy-gradient part.

    L = L_GRPO(own rows, without the expert in the group) + coef · token mean of −log π over the experts' tokens

From GRPO: own rows only (origin not 2), no KL; the cross-entropy reads rows of origin 2. coef = 1 is ours: the losses
have no common unit.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import ExpertNLL, OwnRows, OwnZScore, SequenceMean

SFT_MIXTURE = GRPO.but(
    name="sft_mixture",
    source="kenpo",
    status="our reading",
    advantage=OwnZScore(),
    weights=(OwnRows(),),
    regularizers=(ExpertNLL(coef=1.0),),
    aggregate=SequenceMean(over="kept"),
)
