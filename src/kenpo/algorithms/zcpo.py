"""ZCPO — zero-sum coefficient policy optimization ("When KL regularization misfires", arXiv:2610.12161).

A KL term beside the objective acts alone where it should not: on clipped tokens, in groups whose rewards agree, more on
long responses. ZCPO moves it into the advantage: a response pays for the divergence it has above its group's mean.

    C_i = A_i/s − β (D_i − mean D),   A = R − mean,  s = max |A|,  D_i = mean_t KL(π_θ‖π_ref) over the full vocabulary
    J = DAPO's clipped token mean with C for A

C sums to 0 in a group, follows the current policy and is constant under the gradient; it may differ from A in sign, and
the clip follows C. From DAPO: the advantage. Two phases: D of the whole minibatch must be known first; it needs
``kl_ref``, reduced in float32. β 4 (diagnostics; 20 still works, 0 keeps the division by s). The authors' runs also
drop uniform groups and penalise overlong answers: ``--with drop_uniform_groups``, ``--with soft_overlong``.
R = (1,0,0,1), D = (.1,.2,.3,.4): C = (1.6, −.8, −1.2, .4).
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import ZeroSumKL

ZCPO = DAPO.but(
    name="zcpo",
    source="arXiv:2610.12161",
    selection=(),
    shaping=(),
    advantage=ZeroSumKL(beta=4.0),
)
