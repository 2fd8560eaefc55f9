"""Reward model: a scalar head fitted to preferences by Bradley and Terry's model (arXiv:2203.02155).

Someone, or a verifier, says which of several responses to a prompt is better. A model with a scalar head at the last
token learns scores whose differences explain the choices; later the score stands in for the judge.

    L = mean over prompts of the mean over decided pairs of  −log σ(s_i − s_j),   R_i > R_j

Reads `Policy.score`, no log-probs. A group is a prompt with any number of judged responses; its pairs count as one
example, as InstructGPT has it (one pair per group: the plain mean over pairs). ``surrogate.margin`` takes off how much
better the preferred one is said to be (Llama 2), ``surrogate.centring`` (.01 in arXiv:2312.09244) holds scores near 0:
only differences are learnt, so a prompt's scores may drift together. Ties and responses without a token leave.
"""

from kenpo.algorithm import Algorithm
from kenpo.stages import ContrastMean, Ones, PairLogistic

REWARD_MODEL = Algorithm(
    name="reward_model",
    source="arXiv:2203.02155",
    advantage=Ones(),
    surrogate=PairLogistic(on="score", beta=1.0),
    aggregate=ContrastMean(),
)
