"""KPop — binary-KL mask (Ling/Ring 2.6, arXiv:2606.15079).

A band on ρ treats a token of probability .001 like one of .9. KPop asks instead how far apart the two engines' beliefs
in "this token" are, in both directions; the accepted band of ρ is wide for rare tokens and narrow for likely ones.

    M = 1[B(p‖q) ≤ φ and B(q‖p) ≤ φ],   B(p‖q) = p log(p/q) + (1−p) log((1−p)/(1−q)),   p = π_old, q = μ

From IcePop: another mask in place of M. As printed, kept tokens have weight 1; whether they also keep ρ is not said
(``keep_rho``). No φ is published: .05 is ours; AReaL's 2.0 masks almost nothing. For tiny q the lower side is open:
KPop does not reject ρ → 0 on rare tokens, IcePop does. Blind to the sign of A, unlike DPPO's binary KL.
"""

from kenpo.algorithms.icepop import ICEPOP
from kenpo.stages import BinaryKLMask

KPOP = ICEPOP.but(
    name="kpop",
    source="arXiv:2606.15079",
    weights=(BinaryKLMask(threshold=0.05, keep_rho=False),),
    status="our reading",
)
