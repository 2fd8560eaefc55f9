"""MiniLLM — distillation by the sequence's reverse KL (arXiv:2306.08543), paper and code.

A small model cannot cover all that a large one says; the reverse KL lets it pick. Its gradient has two parts: the
divergence at this token, whole, and what the token leads into, a return over later tokens.

    sampler: .2·q + .8·p, so `logp_sampler` holds the mixture's log-probs;   ρ = π/mixture of this token
    L = Σ_t [ −min(ρR, clip(ρ, 1 ± .2) R) + sg(ρ)·KL(π‖q)_t ],   R_t = mean of log q − log π_old over later tokens

From GKD: the return with a clipped ratio, and the divergence, reverse, as a penalty. `minillm-inclusive` is the code: R
counts this token too (its signal twice), discounts by .95, is whitened over the batch (there with padding), the KL is
not weighted, token mean. Left out: the language-model loss on a corpus and the supervised start. One short divisor of
the printed R is mended.
"""

from kenpo.algorithms.gkd import GKD
from kenpo.stages import Clip, FutureGap, SequenceSum, TeacherTerm, TermPenalty, TokenMean, TokenRatio

MINILLM = GKD.but(
    name="minillm",
    source="arXiv:2306.08543",
    advantage=FutureGap(normalise=True),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Clip(low=0.2, high=0.2),
    regularizers=(TermPenalty(TeacherTerm("reverse"), weight="ratio"),),
    aggregate=SequenceSum(),
)

MINILLM_INCLUSIVE = MINILLM.but(
    name="minillm-inclusive",
    source="github.com/microsoft/LMOps",
    status="our reading",
    advantage=FutureGap(inclusive=True, gamma=0.95, whiten=True),
    regularizers=(TermPenalty(TeacherTerm("reverse")),),
    aggregate=TokenMean(),
)
