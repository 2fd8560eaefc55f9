"""ConSPO — contrastive sequence policy optimization (arXiv:2605.12969), a reconstruction.

With binary rewards GRPO pushes the mean score of right responses up and that of wrong ones down, each alike. ConSPO
contrasts each right response with the wrong ones of its group, so that badly separated pairs teach most.

    s_i = mean_t log π,   L = −(1/|P|) Σ_P log [ e^((s_i−m)/τ) / (e^((s_i−m)/τ) + Σ_N e^(s_j/τ)) ],  mean over groups

Known from the abstract: length-normalised log-probs, wrong responses as distractors, a scheduled margin. Not public:
τ (1 here), the margin's place, range and schedule (0 here), any clip, code. P: above the group's mean. Not the paper's
objective. No ratio: one update per batch.
"""

from kenpo.algorithms.rloo import RLOO
from kenpo.stages import ContrastMean, GroupCentred, GroupInfoNCE

CONSPO = RLOO.but(
    name="conspo",
    source="arXiv:2605.12969",
    status="reconstruction",
    advantage=GroupCentred(),
    surrogate=GroupInfoNCE(tau=1.0, margin=0.0),
    aggregate=ContrastMean(),
)
