"""RIPO — a clip of equal chi-square for every token (arXiv:2607.10169).

One clip width for all tokens is far too wide for a token of probability .9 and far too narrow for one of .001. RIPO
gives each token the radius at which it has spent the same local divergence, π_old (r−1)² = δ.

    ε = √(δ/π_old),   J = (1/Σ n) Σ min(r A, clip(r, max(1−ε, .5), min(1+ε, 10)) A),   δ = .05

From DAPO's loss: the bounds. π_old .01, .05, .2, .8 give ε 2.24, 1, .5, .25: rare tokens get wide bounds. Bounds are
absolute numbers. A rendering in circulation grows the radius with π_old, which is the opposite.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import ChiSquareClip, TokenMean

RIPO = GRPO.but(
    name="ripo",
    source="arXiv:2607.10169",
    surrogate=ChiSquareClip(delta=0.05, floor=0.5, cap=10.0),
    regularizers=(),
    aggregate=TokenMean(),
)
