"""RLiD — reinforcement learning in the decision plane, a reconstruction.

Where an agent chooses from a menu, sampling words to say which costs tokens and noise. Each legal action gets a label
token; one forward pass reads the labels' logits, and the policy is their softmax over the menu.

    π(a|s) = e^z(a) / Σ_b∈menu e^z(b),   r = π/π_old of the decision,   J = mean over decisions of min(r A, clip(r) A)

From Dr. GRPO: the ratio of one decision, over the same menu on both sides, and the mean over decisions. Known is the
relation between text and action: the text's score, given the action, has the action's score as its mean, so
its gradient has the smaller variance; `kenpo.ops.decisions.action_logp` states it, a test enumerates it. Not public:
the critic, KL and entropy terms. Ours: the advantage R − mean of a state's samples. A task with menus must sample from
them (`rollouts.support_ids`). Labels may carry a bias of their own: watch the label marginal beside the row entropy.
"""

from kenpo.algorithms.dr_grpo import DR_GRPO
from kenpo.stages import DecisionRatio, SequenceMean

RLID = DR_GRPO.but(
    name="rlid",
    source="RLiD, the decision plane",
    status="reconstruction",
    ratio=DecisionRatio(),
    aggregate=SequenceMean(),
)
