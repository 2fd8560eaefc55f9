"""GMPO — Geometric-Mean Policy Optimization (arXiv:2507.20673).

An arithmetic mean of token ratios follows its outliers. GMPO takes the geometric mean and clips each token in log space
before it enters, on the side the advantage pushes.

    d' = min(d, h) if A > 0, max(d, −l) if A < 0,   d = log r;    J = (1/N) Σ_i A_i exp((1/n_i) Σ_t d'_it)

From GSPO: the bound moves from the sequence to its tokens. A clipped token has no gradient and still limits the mean;
without the bound this is GSPO without its clip. 0.4 is in log space: ratios in (0.67, 1.49).

As printed, the lower bound e1 has no effect and the floor for A < 0 is 1/e2; the authors' code, verl and TRL use the
lower bound. They agree while the two are equal, as here; `gmpo-literal` mirrors the upper one (``bound.low`` None):
with l .2 and h .5 a test batch gives −.1047 by the codes' rule, −.1386 by the printed one. A form that adds a constant
and puts A inside the mean circulates; log of a negative number is undefined, and `ShiftedMean` refuses it with A < 0.
"""

from kenpo.algorithms.gspo import GSPO
from kenpo.stages import Linear, LogClip, SequenceRatio

GMPO = GSPO.but(
    name="gmpo",
    source="arXiv:2507.20673",
    ratio=SequenceRatio(bound=LogClip(low=0.4, high=0.4)),
    surrogate=Linear(),
)

GMPO_LITERAL = GMPO.but(name="gmpo-literal", ratio=SequenceRatio(bound=LogClip(low=None, high=0.4)))
