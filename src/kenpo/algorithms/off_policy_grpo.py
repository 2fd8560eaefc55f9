"""Off-policy GRPO — "Revisiting GRPO: on-policy and off-policy training" (arXiv:2505.22257).

If the sampler lags behind by several updates, a clip around 1 silences tokens before the first step is taken. Here the
ratio is to the sampler, and the clip is centred on where the update starts.

    ρ = π_θ/μ,  ρ_k = π_old/μ,  J = (1/N) Σ (1/n) Σ min(ρ A, clip(ρ, max(ρ_k−.2, 0), ρ_k+.2) A)
    A = (R − mean)/√(var + 1e-4), population variance, eps under the root

From GRPO: the anchor, the centre of the clip, the advantage's constants, no KL. Groups without variance contribute 0
and stay in N. With μ = π_old it is GRPO. Widths are ours where the paper is silent; its ratios are of sequences in
theory and of tokens in practice. That this is the paper meant by "off-policy GRPO" is our identification.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import CentredClip, GroupZScore, TokenRatio

OFF_POLICY_GRPO = GRPO.but(
    name="off_policy_grpo",
    source="arXiv:2505.22257",
    advantage=GroupZScore(eps=1e-4, ddof=0, inside=True),
    ratio=TokenRatio(anchor="sampler"),
    surrogate=CentredClip(radius=0.2, floor=0.0),
    regularizers=(),
    status="our reading",
)
