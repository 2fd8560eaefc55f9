"""MinPRO — Minimum Prefix Ratio (arXiv:2601.22718).

Off policy, a token's gradient should be weighed by how likely its whole prefix has become, a product too wild to use.
MinPRO puts the smallest single ratio among the earlier tokens in its place.

    u_t = min over earlier tokens of r (1 for the first),   w_t = u_t r_t,   r = π_θ/μ
    J = (1/Σ n) Σ sg[clip(w_t, .8, 1.28)] A log π

From CISPO: the weight. μ is the policy that sampled: with one fresh batch per update every ratio is 1. The bounds are
ours (DAPO's widths); the abstract gives the strict prefix, two independent reports the product and the detached clip.
Where every earlier ratio exceeds 1 the prefix amplifies: ``ratio.cap_prefix_at_one`` stops that (off, as published).

`minpro-inclusive` takes the smallest ratio up to *and with* t in place of the product: late tokens only lose weight. On
ratios 1.2, .9, 1.5, .6, 2, 1.1: w = 1.2, 1.08, 1.35, .54, 1.2, .66, and 1.2, .9, .9, .6, .6, .6 inclusive.
"""

from kenpo.algorithms.cispo import CISPO
from kenpo.stages import DetachedClip, PrefixMinRatio

MINPRO = CISPO.but(
    name="minpro",
    source="arXiv:2601.22718",
    ratio=PrefixMinRatio(form="strict"),
    surrogate=DetachedClip(floor=0.8, cap=1.28),
    status="our reading",
)

MINPRO_INCLUSIVE = MINPRO.but(name="minpro-inclusive", ratio=PrefixMinRatio(form="inclusive"))
