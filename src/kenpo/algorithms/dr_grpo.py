"""Dr. GRPO — GRPO done right (arXiv:2503.20783).

Two divisions of GRPO are taken out because they bias the gradient: the standard deviation in the advantage (favours
very easy and very hard prompts) and the response length in the mean (favours short right and long wrong answers).

    J = (1/N) Σ_i (1/C) Σ_t min(r A, clip(r, 1−ε, 1+ε) A),   A = R − mean(R),   C a constant length
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import FixedLength, GroupCentred

DR_GRPO = GRPO.but(
    name="dr_grpo",
    source="arXiv:2503.20783",
    advantage=GroupCentred(),
    regularizers=(),
    aggregate=FixedLength(length=None),
)
