"""GRAFT — cross-model trajectory exchange, the receiver's update (arXiv:2609.37868).

Two policies train side by side; where one fails on a prompt entirely and the other does not, it learns from the other's
whole group. A response far from what the receiver would write is dropped, a slightly foreign one weighs less.

    J = (1/Σ n_j) Σ_j w_j Σ_t min(r A, clip(r, 1−.2, 1+.28) A),   w = min(s, 1) if s > .8 else 0
    s = exp( mean log π_old(receiver, its tokens) − mean log π(source, its tokens) );   own responses: w = 1

From DAPO without its filters: the weight. r is the receiver's own new/old ratio. Advantages stay those of the source
group, so a peer's group keeps an id of its own. Responses with s ≤ .8 are removed before the update, so they leave the
denominator; an earlier summary keeps them: ``aggregate.over=all``. ``rollouts.logp_source`` holds the source's mean
log-prob, NaN for own responses. Which groups are exchanged, and that peers' minibatches go last, is the loop's.
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import Compatibility, TokenMean

GRAFT = DAPO.but(
    name="graft",
    source="arXiv:2609.37868",
    selection=(),
    shaping=(),
    weights=(Compatibility(threshold=0.8),),
    aggregate=TokenMean(over="kept"),
)
