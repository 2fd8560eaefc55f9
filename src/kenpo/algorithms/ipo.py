"""IPO — identity preference optimization (arXiv:2310.12036), summed or per token.

Where one response always wins, DPO's best margin is infinite and the reference is forgotten. IPO asks for a margin of
1/(2·beta) and no more.

    L = (h − 1/(2·beta))²,   h as in DPO, beta = .1

From DPO: the square in place of the logistic. `ipo-normalised` divides each side's log-ratio by its tokens, as TRL
does; its beta is another number.
"""

from kenpo.algorithms.dpo import DPO
from kenpo.stages import PairSquared

IPO = DPO.but(name="ipo", source="arXiv:2310.12036", surrogate=PairSquared(beta=0.1))

IPO_NORMALISED = IPO.but(name="ipo-normalised", status="our reading", surrogate=PairSquared(beta=0.1, normalise=True))
