"""ReMax — a greedy response as the baseline (arXiv:2310.10505).

No critic and no group: what the current policy answers without sampling tells how hard the prompt is. One more greedy
decode per prompt, and one sample is enough.

    J = (1/N) Σ_i Σ_t (R_i − R(greedy)) log π

From RLOO: the baseline. ``advantage.kl`` > 0 puts a KL into the reward, and R is then what is still to come from each
token. No ratio: strictly one update per batch. The sum over tokens is not divided by a length (our reading of the
paper's expectation; verl puts the same advantage under PPO's clip).
"""

from kenpo.algorithms.rloo import RLOO
from kenpo.stages import GreedyBaseline

REMAX = RLOO.but(name="remax", source="arXiv:2310.10505", advantage=GreedyBaseline())
