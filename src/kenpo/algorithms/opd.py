"""OPD — on-policy distillation (Thinking Machines, 2025), with three other codes of it.

A stronger model says, at each token the student sampled, how much likelier it would have made it. That gap is an
advantage: dense, on the student's own states, and no verifier is needed.

    A_t = c·( log q(y_t) − log π_old(y_t) ),   J = token mean of min(r A, clip(r, 1 ± .2) A),   c = 1

From GRPO: the advantage; no KL, token mean. Its expected gradient is that of −KL(π‖q) at each prefix. Later tokens are
not credited (discount 0; with 1, the sequence's KL). The four anchors and bounds agree on policy.
`opd-tinker`: the gap to μ, −A·π/μ, unclipped, a sum over tokens. `opd-prime`: the gap to π_θ, anew each minibatch, the
same ratio, tokens that fell by more than .2 dropped, a spring 1e-3·log²(π/μ). `opd-prefix` (IW-OPD, arXiv:2606.22600):
a score function with more weight on early tokens. Off policy the score-function forms are biased.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Clip, FallMask, Linear, ScoreFunction, SequenceSum, TeacherGap, TokenMean, TokenRatio
from kenpo.stages.teachers import PrefixShare, SquaredDrift

OPD = GRPO.but(
    name="opd",
    source="thinkingmachines.ai/blog/on-policy-distillation",
    advantage=TeacherGap(coef=1.0, anchor="old", discount=0.0),
    surrogate=Clip(low=0.2, high=0.2),
    regularizers=(),
    aggregate=TokenMean(),
)

OPD_TINKER = OPD.but(
    name="opd-tinker",
    advantage=TeacherGap(anchor="sampler"),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Linear(),
    aggregate=SequenceSum(),
)

OPD_PRIME = OPD.but(
    name="opd-prime",
    source="github.com/PrimeIntellect-ai/prime-rl",
    advantage=TeacherGap(anchor="current"),
    weights=(FallMask(drop=0.2),),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Linear(),
    regularizers=(SquaredDrift(coef=1e-3),),
)

OPD_PREFIX = OPD.but(
    name="opd-prefix",
    source="arXiv:2606.22600",
    weights=(PrefixShare(boost=0.5),),
    ratio=None,
    surrogate=ScoreFunction(),
)
