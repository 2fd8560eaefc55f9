"""MIS — Masked Importance Sampling (TRL, slime, verl, NeMo-RL).

Where TIS cuts a large ρ = π_old/μ, MIS drops the token: outside the band the two engines disagree too much for its
gradient to be trusted, whatever its size. Inside, ρ is kept.

    J = (1/Σ n_i) Σ_i Σ_t ρ·1[lo ≤ ρ ≤ hi] · min(r A, clip(r, 1−ε, 1+ε) A)

From TIS: another weight. The band .5/2 is slime's; bounds are inclusive; masked tokens stay in the denominator (slime;
verl's rejection takes them out: ``aggregate.over=kept``). `mis-sequence` tests and weighs by the product over the
response. `mis-geometric` is OpenRLHF's and NeMo-RL's seq-mask-tis: a response is kept if the geometric mean of its ρ
lies in .999-1.002, and its tokens then carry their raw, untruncated ρ. ``weights.masked_is.veto`` drops a response with
any ρ below it (slime: 1e-4).
"""

from kenpo.algorithms.tis import TIS
from kenpo.stages import MaskedIS

MIS = TIS.but(name="mis", source="TRL, slime, verl", weights=(MaskedIS(floor=0.5, cap=2.0),))

MIS_SEQUENCE = MIS.but(name="mis-sequence", weights=(MaskedIS(floor=0.5, cap=2.0, level="sequence"),))

MIS_GEOMETRIC = MIS.but(
    name="mis-geometric",
    source="OpenRLHF, NeMo-RL",
    weights=(MaskedIS(floor=0.999, cap=1.002, level="geometric"),),
)
