"""Off-Context GRPO — learning from rollouts under a privileged prompt (arXiv:2607.19313; AgPriyank/OC-GRPO).

Shown part of the solution, a policy solves what it could not; trained as if it had not been shown, it learns to.
A response that only the hint made likely would pull too hard, so its tokens weigh less.

    J = token mean of w·min(r A, clip(r, 1 ± .2) A),   r = π_θ(y|x)/π_old(y|x) on the plain prompt x
    w = clamp( π_old(y|x)/π_old(y|guided x), .01, 1 ),   a constant per token

From GRPO: the weight, the token mean, no KL. `logp_guided` holds log π_old under the prompt that sampled; on an
unguided row it is `logp_old`, which makes w = 1, and all of it plain GRPO. Of the code: floor .01 is that of every
published run (its default is .3); ``weights.off_context.level=sequence`` takes exp(−mean) once per response. A is the
group's z-score (ours).
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import OffContext, TokenMean

OC_GRPO = GRPO.but(
    name="oc_grpo",
    source="arXiv:2607.19313",
    weights=(OffContext(power=1.0, floor=0.01, cap=1.0),),
    regularizers=(),
    aggregate=TokenMean(),
)
