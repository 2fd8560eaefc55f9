"""IcePop and Online IcePop (arXiv:2510.18855; Ling/Ring 2.6, arXiv:2606.15079, eq. 5).

In mixture-of-experts models the engine and the trainer route differently and their probabilities drift apart. Tokens on
which they disagree by more than a factor are popped out; the rest keep their correction.

    J = (1/N) Σ_i (1/n_i) Σ_t M(ρ) · min(r A, clip(r, 1−ε, 1+ε) A),   M(ρ) = ρ if .5 ≤ ρ ≤ 5 else 0,  ρ = π_old/μ

It is GRPO without KL and MIS's weight with a wider band. The report does not define M inside the band; every
implementation keeps ρ. The mask is on π_old/μ: with π_θ for π_old (as AReaL's documentation writes) it would react to
staleness too, another method.

Online IcePop is a schedule, not another loss: exactly one update per rollout batch, so that r = 1, no clip acts and the
gradient is M(ρ)·A·∇log π. Its stages are IcePop's; `kenpo train` refuses more than one update per batch. π_old is then
π_θ detached and no second scoring pass runs.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import MaskedIS

ICEPOP = GRPO.but(
    name="icepop",
    source="arXiv:2510.18855",
    weights=(MaskedIS(floor=0.5, cap=5.0),),
    regularizers=(),
)

ONLINE_ICEPOP = ICEPOP.but(name="online_icepop", source="hijkzzz.notion.site, 2025-12-16", updates=1)
