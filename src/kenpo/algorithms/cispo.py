"""CISPO — Clipped Importance Sampling Policy Optimization (MiniMax-M1, arXiv:2506.13585).

PPO's clip silences tokens, often the rare ones that start a reflection. CISPO bounds the importance weight and detaches
it: every token keeps a gradient.

    J = (1/Σ n_i) Σ_i Σ_t sg[min(r, cap)] · A · log π

The lower bound is off, as in the paper's experiments. The paper gives no number for the cap; 5 is ours, from the range
4-8 that ScaleRL (arXiv:2510.13786) found insensitive. `cap` is absolute, not a distance from 1: other codes call either
"epsilon_high".

`cispo-floor` is the two-sided clip of verl's defaults, [.8, 1.2]; a floor lifts the weight of tokens that have become
unlikely. `cispo-band` is that clip (widths ours) under GRPO's mean of response means.
`cispo-mask` adds the paper's unified mask, which drops what PPO's clip would (ours: its widths .2/.28). On a
test batch cap 5 gives −.0892, cap 1.28 −.1260, [.8, 1.2] −.1594. `cispo-dynamic` is the paper's whole recipe: with
DAPO's dynamic sampling and length penalty (``shaping.soft_overlong.limit``).
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import DetachedClip, DropUniformGroups, RatioGate, SequenceMean, SoftOverlong, TokenMean

CISPO = GRPO.but(
    name="cispo",
    source="arXiv:2506.13585",
    surrogate=DetachedClip(floor=None, cap=5.0),
    regularizers=(),
    aggregate=TokenMean(),
)

CISPO_FLOOR = CISPO.but(name="cispo-floor", surrogate=DetachedClip(floor=0.8, cap=1.2), status="our reading")
CISPO_BAND = CISPO_FLOOR.but(name="cispo-band", aggregate=SequenceMean())
CISPO_MASK = CISPO.but(name="cispo-mask", weights=(RatioGate(low=0.2, high=0.28),), status="our reading")
CISPO_DYNAMIC = CISPO.but(name="cispo-dynamic", selection=(DropUniformGroups(),), shaping=(SoftOverlong(),))
