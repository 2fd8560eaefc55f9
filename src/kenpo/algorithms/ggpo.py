"""GGPO — Gibbs-gap policy optimization (arXiv:2610.20814), a reconstruction.

The best policy under a KL to a reference is that reference's Gibbs policy: reward minus β times the log-ratio is then
the same for every response. GGPO makes that gap its loss; no importance weight is needed at any staleness.

    z_i = R_i/β − log(π_θ(y_i)/π_ref(y_i)),   L = log mean e^z − mean z ≥ 0 per mixed group, mean over groups

dL/d log π_i = −(softmax(z)_i − 1/G). Known: the adjusted reward, the log-mean-exp form, mixed groups only, a reference
that is refreshed. Not public: the scale of β (1 here), length normalisation, a stabiliser, the refresh. Not the paper's
objective.
"""

from kenpo.algorithms.conspo import CONSPO
from kenpo.stages import GibbsGap

GGPO = CONSPO.but(name="ggpo", source="arXiv:2610.20814", surrogate=GibbsGap(beta=1.0))
