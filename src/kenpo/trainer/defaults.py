"""What is used for options that are not given, and the named sets of options (`--recipe`)."""

from __future__ import annotations

from typing import Any

# What is used for a field left at None.
USUAL: dict[str, Any] = {
    "steps": 200, "prompts": 16, "group_size": 8, "lr": 1e-6, "warmup": 0, "betas": (0.9, 0.999), "max_tokens": 256,
    "eval_every": 20, "checkpoint_every": 20, "settings": {},
}  # fmt: skip
# The measured recipe for the bundled model on its task (recipes/first_run.py); GRPO without KL, clip-higher.
RECIPE: dict[str, Any] = {
    "steps": 12, "prompts": 16, "group_size": 8, "lr": 1e-4, "warmup": 10, "betas": (0.9, 0.99), "max_tokens": 40,
    "eval_every": 4, "checkpoint_every": 4,
}  # fmt: skip
RECIPE_SETTINGS: dict[str, Any] = {"regularizers": [], "surrogate.high": 0.28}  # with the recipe's algorithm, grpo

# What is used where the source is demonstrations.
SUPERVISED: dict[str, Any] = {
    "steps": 220, "prompts": 64, "group_size": 1, "lr": 1e-3, "warmup": 20, "betas": (0.9, 0.99), "max_tokens": 64,
    "eval_every": 0, "checkpoint_every": 50,
}  # fmt: skip
# The measured recipe for the bundled pairs.
PAIRED: dict[str, Any] = {
    "steps": 64, "prompts": 32, "lr": 1e-5, "warmup": 4, "betas": (0.9, 0.99), "max_tokens": 40, "eval_every": 16,
    "checkpoint_every": 32,
}  # fmt: skip

#: Named sets of options (`--recipe`); options beside one win. Measured by benchmarks/effects/recipes.py.
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
}  # fmt: skip
#: How their tasks are made hard fits the bundled model alone.
ONLY_BUNDLED = frozenset({"long-answers", "sparse-reward"})
