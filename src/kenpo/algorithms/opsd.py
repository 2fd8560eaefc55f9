"""OPSD — on-policy self-distillation from a solution (arXiv:2601.18734).

The base model, shown the verified solution, is the teacher of the model that is not shown it.

    L = token mean over hinted rows of KL(q‖p), whole vocabulary, T = 1.1 on both,  q = base model with the solution

From SDPO: the divergence, forward and whole, and no ratios. The third release also cuts each summand of the KL from
above (.05 or .06), so that the loss may be negative and its gradient vanish or turn, kept because it scored better:
``surrogate.divergence.clip=0.05``. Off here. SDFT (arXiv:2601.19897) is this with a demonstration as the hint.
"""

from kenpo.algorithms.sdpo import SDPO
from kenpo.stages import Hinted, MinimiseTerm, TeacherTerm

OPSD = SDPO.but(
    name="opsd",
    source="arXiv:2601.18734",
    weights=(Hinted(by="column", average=0.0),),
    surrogate=MinimiseTerm(TeacherTerm(kind="forward", temperature=1.1, clip=None)),
)
