"""SFT — supervised training on demonstrations.

The root of all others: raise the log-prob of what is shown. No reward, no ratio, no reference.

    L = −(1/N) Σ_t log π(y_t)   over the N response tokens of the minibatch, their end included

In the house's words: advantage 1 on every token, the score function as surrogate, a token mean over the whole
minibatch, so that the loss does not depend on microbatches or ranks. Prompts are masked. The loss value is the mean
negative log-likelihood in nats per token. `kenpo sft` runs it on prompts and responses.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Ones, ScoreFunction, TokenMean

SFT = GRPO.but(
    name="sft",
    source="the cross-entropy of next-token prediction",
    advantage=Ones(),
    ratio=None,
    surrogate=ScoreFunction(),
    regularizers=(),
    aggregate=TokenMean(),
)
