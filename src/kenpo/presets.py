"""Named sets of options of `kenpo train` (`--recipe NAME`), one screen in all."""

from __future__ import annotations

from typing import Any

#: Named sets of options (`--recipe`); options beside one win. Measured by benchmarks/effects/recipes.py
#: and methods.py.
RECIPES: dict[str, dict[str, Any]] = {
    # One update a batch: every ratio is 1, what is left is the advantage and the average.
    "on-policy": {"minibatches": 1, "epochs": 1},
    # Eight updates a batch, at the learning rate that they bear: ratios move and bounds act.
    "several-updates": {"minibatches": 4, "epochs": 2, "lr": 2e-5},
    # A limit that no right answer exceeds and that cuts about one response in ten.
    "long-answers": {"temperature": 1.7, "max_tokens": 32, "steps": 16, "lr": 1e-4},
    # About one sample in ten is right at the start, and four groups in ten hold no right one.
    "sparse-reward": {"temperature": 2.0, "steps": 16, "lr": 1e-4},
    # A critic that first learns alone, then every token is judged by what came of it; vapo: lambdas for long answers.
    "ppo": {
        "algorithm": "ppo", "critic": "copy", "critic_lr": 1e-3, "critic_warmup": 4, "steps": 16, "minibatches": 4,
        "lr": 5e-5,
    },
    "vapo": {
        "algorithm": "vapo", "critic": "copy", "critic_lr": 1e-3, "critic_warmup": 4, "steps": 16, "minibatches": 4,
        "lr": 5e-5,
    },
    # A worked solution joins each group: with an importance weight (luffy), under a KL to the start (grin), as a loss
    # of its own (sft_mixture), restated by the policy (repo), shown while sampling (oc_grpo), or from a second policy.
    "luffy": {"algorithm": "luffy"},
    "grin": {"algorithm": "grin"},
    "sft_mixture": {"algorithm": "sft_mixture"},
    "repo": {"algorithm": "repo"},
    "oc_grpo": {"algorithm": "oc_grpo"},
    "graft": {"algorithm": "graft", "partner": "bundled"},
    # The policy teaches itself: shown another right answer of the group, or the task's hint. With --teacher MODEL: opd
    # and gkd on the policy's samples, minillm on a mixture's, teacher_mixed beside the reward.
    "sdpo": {"algorithm": "sdpo", "teacher": "hint"},
    "opsd": {"algorithm": "opsd", "teacher": "hint"},
    "opd": {"algorithm": "opd"},
    "gkd": {"algorithm": "gkd"},
    "minillm": {"algorithm": "minillm"},
    "teacher_mixed": {"algorithm": "teacher_mixed"},
    # No group: every prompt is compared with its own record. Bundles of questions judged by their bad outcomes. Rare
    # valid answers earn more. No answers: the majority's vote is the reward.
    "spo": {"algorithm": "spo", "group_size": 1, "prompts": 128},
    "riskpo": {"algorithm": "riskpo"},
    "gapo": {"algorithm": "gapo"},
    "mad_rl": {"algorithm": "mad_rl"},
    "ttrl": {"algorithm": "ttrl"},
}  # fmt: skip
#: How their tasks are made hard fits the bundled model alone.
ONLY_BUNDLED = frozenset({"long-answers", "sparse-reward"})
