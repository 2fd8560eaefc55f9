"""LUFFY — learning to reason under off-policy guidance (arXiv:2504.14945).

A policy that never solves a prompt learns nothing from its own attempts. LUFFY puts one expert trace into each group
and shapes the probability of its tokens, so that the rare, instructive ones are not drowned by the likely ones.

    own token: r A, no clip;   expert's token: f(p) A,  f(p) = p/(p + .1);   A = R − mean over the whole group
    J = (1/length) Σ over all tokens

From Dr. GRPO: the ratio by origin, no clip, and the released script's denominator, which leaves N out (with
``aggregate.rows`` it is 1/(N·length)). An expert's rollout has ``origin`` 2. The script adds an entropy bonus of .001
(``--with entropy_bonus``), off here. `luffy-known` divides by the expert's recorded probability instead, p/(μ + 1e-6),
unshaped. At p = .001 the shaped coefficient is .0098 A. Simplified renderings with a clip and a KL are another method.
"""

from kenpo.algorithms.dr_grpo import DR_GRPO
from kenpo.stages import ByOrigin, ExpertRatio, FixedLength, Linear, ShapedProbability, TokenRatio

LUFFY = DR_GRPO.but(
    name="luffy",
    source="arXiv:2504.14945",
    ratio=ByOrigin(own=TokenRatio(), expert=ShapedProbability(gamma=0.1)),
    surrogate=Linear(),
    aggregate=FixedLength(length=None, rows=False),
)

LUFFY_KNOWN = LUFFY.but(name="luffy-known", ratio=ByOrigin(own=TokenRatio(), expert=ExpertRatio()))
