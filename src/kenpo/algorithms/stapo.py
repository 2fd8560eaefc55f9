"""STAPO — Spurious-Token-Aware Policy Optimization (arXiv:2602.15620).

The squared logit gradient of a token is largest where its probability and the entropy are both low. In good responses
such tokens are mostly slips that were rewarded by accident; about .01 % of tokens, silencing them steadies training.

    J = (1/Σ I) Σ_i Σ_t I · min(r A, clip(r, 1−.2, 1+.28) A)
    I = 0 where A > 0, π_θ < .002 and entropy < the 75 % quantile over such candidates of the minibatch, else 1

From DAPO: the weight, the survivors' denominator, no dynamic sampling. π and entropy are the current policy's (inferred
from the algorithm box). A second source takes the 80 % quantile over all tokens: ``scope=batch``; which version of the
paper carries which is contradictory. `stapo-rare` leaves out low entropy and A > 0: it silences every rare token (in
the paper's ablation worse). `stapo-soft` has soft weights (.5, ours), over the sum of weights.
"""

from kenpo.algorithms.dapo import DAPO
from kenpo.stages import SpuriousTokens, TokenMean

STAPO = DAPO.but(
    name="stapo",
    source="arXiv:2602.15620",
    selection=(),
    shaping=(),
    weights=(SpuriousTokens(probability=0.002, quantile=0.75, scope="conditional"),),
    aggregate=TokenMean(over="kept"),
)

STAPO_SOFT = STAPO.but(
    name="stapo-soft",
    weights=(SpuriousTokens(probability=0.002, quantile=0.75, scope="conditional", weight=0.5),),
    aggregate=TokenMean(over="weight"),
    status="our reading",
)

STAPO_RARE = STAPO.but(
    name="stapo-rare", weights=(SpuriousTokens(probability=0.002, criteria="probability"),), status="our reading"
)
