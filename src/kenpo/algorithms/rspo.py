"""RSPO — Router-Shift Policy Optimization (arXiv:2510.23027).

In a mixture of experts a small update may send a token to other experts, and its ratio then says little. RSPO scales
ratios down by how far the routers moved at the experts that were active before.

    γ_t = max(.8, exp(−(1/L) Σ_l (1/K) Σ_k |log p_l(e_lk) − log p_l,old(e_lk)|)),  a constant
    J = (1/N) Σ_i A_i exp((1/n_i) Σ_t (d'_it + log γ_it)),   d' = GMPO's clipped log-ratios

From GMPO: the shift. γ stands outside the sign power: taken literally it would become 1/γ where A < 0 and amplify
drift. In this form γ scales a response as a whole; only on token ratios does it single tokens out:
`rspo-pre-clip` clips γ·r (with γ < .8 and A < 0 that silences a token on policy), `rspo-post-clip` weighs the
clipped objective. γ .7158, A = 1, r = 1.25, clip .2: .8947 before, .8589 behind the clip.
Layers are pooled by the geometric mean; the abstract speaks of a product, a public fork averages exp(−|·|) first
(``layers``). Floor .8 is ours. Old scores are those of the old pass at the recorded experts: computed anew, γ is 1.
"""

from kenpo.algorithms.gmpo import GMPO
from kenpo.algorithms.grpo import GRPO
from kenpo.stages import LogClip, RouterShift, RouterStability, SequenceRatio, TokenRatio

RSPO = GMPO.but(
    name="rspo",
    source="arXiv:2510.23027",
    status="our reading",
    ratio=SequenceRatio(bound=LogClip(low=0.4, high=0.4), shift=RouterShift(floor=0.8)),
)

RSPO_PRE_CLIP = GRPO.but(
    name="rspo-pre-clip",
    source="arXiv:2510.23027",
    status="our reading",
    ratio=TokenRatio(shift=RouterShift(floor=0.8, placement="pre_clip")),
    regularizers=(),
)

RSPO_POST_CLIP = RSPO_PRE_CLIP.but(name="rspo-post-clip", ratio=TokenRatio(), weights=(RouterStability(),))
