"""M2PO — Second-Moment Trust Policy Optimization (arXiv:2510.01161), and three other codes and readings.

On stale data a clip masks far too many tokens, most of them informative. M2PO masks only as many outward tokens, the
farthest first, as it takes to bring the second moment of their log-ratios within a budget.

    J = (1/Σ n_i) Σ_i Σ_t M r A,   r = π_θ/μ;   T = {A>0, r>1} ∪ {A<0, r<1}
    from T drop the largest (log r)² until mean_T (log r)² ≤ τ = .04;   M = 0 on the dropped, 1 elsewhere

From DAPO: the ratio's anchor, no clip, the mask; no filters. All tokens stay in the denominator. The budget is the
minibatch's (two phases); ``approximate=microbatch`` does as codes that decide in each microbatch.
`m2po-code`: the release is another algorithm, PPO's min-clip with a range found from T by capping, not dropping.
`m2po-areal`: AReaL's m2_threshold on all tokens' (log π_old/μ)², masked ones out of the denominator; the clip is ours.
`m2po-weight-moment`: bounds E[r²] (1 on policy, so the budget is 1.04), over all tokens; blind to drift with A < 0.
``weights.weight_moment.outward=true`` masks outward tokens only.
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import Clip, CorrectionMoment, Linear, MomentClip, SecondMoment, TokenMean, TokenRatio, WeightMoment

M2PO = DAPO.but(
    name="m2po",
    source="arXiv:2510.01161",
    selection=(),
    shaping=(),
    weights=(SecondMoment(budget=0.04),),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=Linear(),
)

M2PO_CODE = M2PO.but(
    name="m2po-code",
    source="github.com/Infini-AI-Lab/M2PO",
    weights=(),
    surrogate=MomentClip(budget=0.04),
    status="our reading",
)

M2PO_AREAL = M2PO.but(
    name="m2po-areal",
    weights=(CorrectionMoment(budget=0.04),),
    ratio=TokenRatio(),
    surrogate=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(over="kept"),
    status="our reading",
)

M2PO_WEIGHT_MOMENT = M2PO.but(name="m2po-weight-moment", weights=(WeightMoment(budget=1.04),), status="our reading")
