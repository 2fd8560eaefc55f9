"""OPSM — off-policy sequence masking (DeepSeek-V3.2; TRL and slime).

Pushing down a bad response that the policy has meanwhile left anyway teaches little and destabilises much. Bad
responses that drifted too far are dropped whole; good ones are never dropped.

    J = (1/Σ n_i) Σ_i K_i Σ_t min(r A, clip(r, 1−ε, 1+ε) A),   K_i = 0 if A_i < 0 and mean_t log(π_old/π_θ) > δ, else 1

From DAPO without its filters: clip .2/.2 and the weight. δ = .5 is TRL's example; slime's default is 1e-4, four orders
of magnitude away, so the stage has no default of its own. Dropped tokens stay in the denominator (slime); take them out
with ``aggregate.over=kept``. ``weights.off_policy_sequences.anchor=sampler`` measures the drift from μ.
"""

from kenpo.algorithms.tis import TIS
from kenpo.stages import OffPolicySequences

OPSM = TIS.but(name="opsm", source="DeepSeek-V3.2, TRL, slime", weights=(OffPolicySequences(delta=0.5),))
