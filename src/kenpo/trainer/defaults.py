"""What is used for options that are not given; named sets of options are in `kenpo.presets`."""

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
