"""DAPO — Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv:2503.14476).

Four changes to GRPO: a wider upper clip, groups without signal dropped and refilled, one mean over all tokens of the
minibatch, and a soft penalty for overlong responses. No KL.

    J = (1/Σ n_i) Σ_i Σ_t min(r A, clip(r, 1−ε_low, 1+ε_high) A)

The paper prints the token mean inside the expectation over prompts: `dapo-paper-denominator`. Every framework, and this
entry, takes it over the whole minibatch (on a test batch −.0727 against −.0590). `dapo-sequence-mean` has the other
three changes and keeps GRPO's mean of response means. The penalty acts once ``shaping.soft_overlong.limit`` is set;
overlong filtering is ``--with untruncated --set aggregate.over=kept``. A truncated response's reward still enters its
group's mean and spread; ``--with drop_truncated`` takes the response out of both, and out of every count.
"""

from kenpo.algorithms.grpo import GRPO
from kenpo.stages import Clip, DropUniformGroups, GroupTokenMean, SequenceMean, SoftOverlong, TokenMean

DAPO = GRPO.but(
    name="dapo",
    source="arXiv:2503.14476",
    selection=(DropUniformGroups(),),
    shaping=(SoftOverlong(limit=None),),
    surrogate=Clip(low=0.2, high=0.28),
    regularizers=(),
    aggregate=TokenMean(),
)

DAPO_PAPER_DENOMINATOR = DAPO.but(name="dapo-paper-denominator", aggregate=GroupTokenMean())
DAPO_SEQUENCE_MEAN = DAPO.but(name="dapo-sequence-mean", aggregate=SequenceMean(), status="our reading")
