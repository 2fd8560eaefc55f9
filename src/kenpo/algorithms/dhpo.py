"""DHPO — Dynamic Hybrid Policy Optimization (arXiv:2601.05607).

The token ratio of GRPO assigns credit finely and is noisy, the sequence ratio of GSPO is stable and blunt. DHPO mixes
the two, each clamped into its own band before they are mixed.

    m = w r + (1−w) s,   m̄ = w clip(r, 1∓.2) + (1−w) clip(s, 1−3e-4, 1+4e-4),   J = (1/N) Σ (1/n) Σ_t min(m A, m̄ A)

w = 1 is GRPO, w = 0 GSPO-token. Our reading: s is GSPO-token's, so that a token's gradient is its own (`dhpo-plain`
takes GSPO's, through all tokens: the same coefficients only while no branch clips); the bands are those of the parents.
`dhpo-entropy` sets w to the token's entropy, min-max normalised within the response (½ if flat). The paper confirms
both weights and "clip, then mix"; which branch the entropy weighs, its scope and the bands are not public. On a test
batch (sequence band .1/.15) w = ½ gives −.0686, the entropy weight −.0952. min(m, m̄) is not the mix of each
branch's minimum: an r beyond its band still has a gradient while m A is the smaller.
"""

from kenpo.algorithms.gspo import GSPO
from kenpo.stages import BranchClip, SequenceRatio, TokenRatio

DHPO = GSPO.but(
    name="dhpo",
    source="arXiv:2601.05607",
    status="our reading",
    ratio=TokenRatio(),
    surrogate=BranchClip(
        weight=0.5, token_low=0.2, token_high=0.2, sequence_low=3e-4, sequence_high=4e-4,
        sequence=SequenceRatio(gradient="token"),
    ),
)  # fmt: skip

DHPO_PLAIN = DHPO.but(name="dhpo-plain", surrogate=BranchClip(sequence=SequenceRatio(gradient="sequence")))
DHPO_ENTROPY = DHPO.but(name="dhpo-entropy", surrogate=BranchClip(weight="entropy"))
