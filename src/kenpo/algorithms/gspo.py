"""GSPO and GSPO-token — Group Sequence Policy Optimization (arXiv:2507.18071).

Rewards are given to sequences, so the ratio is one number per sequence: the geometric mean of its token ratios. The
clip then decides once per response, within a band 500 to 700 times narrower than a token clip.

    s_i = exp( (1/n_i) Σ_t log r_it ),   J = (1/N) Σ_i min(s_i A_i, clip(s_i, 1−3e-4, 1+4e-4) A_i)

GSPO-token has the same value and, while the advantage is constant in a response, the same gradient; it sends each
token's gradient through that token alone, so that advantages may differ between tokens.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Clip, SequenceRatio

GSPO = GRPO.but(
    name="gspo",
    source="arXiv:2507.18071",
    ratio=SequenceRatio(),
    surrogate=Clip(low=3e-4, high=4e-4),
    regularizers=(),
)

GSPO_TOKEN = GSPO.but(name="gspo_token", ratio=SequenceRatio(gradient="token"))
