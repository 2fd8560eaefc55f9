"""STARE — surprisal-guided token weights (arXiv:2606.19236; hp-luo/STARE).

Entropy collapses because likely tokens of good responses are pushed up again and again. While the entropy is below a
target, STARE gives the most surprising tokens of good responses a little more weight.

    J = (1/Σ n_i) Σ_i Σ_t ω · min(r A, clip(r, 1−.2, 1+.28) A)   (dual clip 3 where A < 0)
    ω = W on the top 10 % of A > 0 tokens by −log π_θ if the batch's mean entropy < H, else 1;   W = 1.1, H = .3

From DAPO: the weight and the dual clip, no filters. `stare-c2` also puts M = .9 on the top 10 % of A < 0 tokens. For
14B and 32B models the authors use 1.05 and .95. The code selects inside each microbatch (``approximate=microbatch``);
the text says batch, and so do we. The adaptive rule for W and M carries state across batches, which a weight does not:
it is `kenpo.ops.trust.adapted_boost`, for a loop to apply with `with_settings`.
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import DualClip, Surprisal

STARE = DAPO.but(
    name="stare",
    source="arXiv:2606.19236",
    selection=(),
    shaping=(),
    weights=(Surprisal(fraction=0.1, boost=1.1, damp=None, target_entropy=0.3),),
    surrogate=DualClip(low=0.2, high=0.28, dual=3.0),
)

STARE_C2 = STARE.but(name="stare-c2", weights=(Surprisal(fraction=0.1, boost=1.1, damp=0.9, target_entropy=0.3),))
