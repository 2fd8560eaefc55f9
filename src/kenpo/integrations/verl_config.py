"""Which of verl's two routes can carry an algorithm, and which knobs would be accepted and do nothing.

Route "registries": an advantage estimator and a policy loss, both by name; a loss sees a microbatch's log-probs, its
advantages and verl's global counts. Route "coefficients": a trainer that sees the whole batch and writes one
coefficient per token. Nothing here imports verl.
"""

from __future__ import annotations

from typing import Any

import kenpo
from kenpo.algorithm import Algorithm
from kenpo.errors import InputError
from kenpo.stages.base import Scope, snake

#: Releases of verl that these routes were tested with.
TESTED = ">=0.9,<0.10"
PREFIX = "kenpo:"

#: Fields that a policy loss is given, and the totals that verl counts over all ranks.
LOSS_FIELDS = frozenset({"mask", "logp_old", "logp"})
LOSS_COUNTS = frozenset({"tokens", "sequences"})
#: Fields that an advantage estimator is given.
ESTIMATOR_FIELDS = frozenset({"mask", "group", "rewards", "token_rewards", "prompt_id"})
#: Fields that the trainer's batch may hold.
BATCH_FIELDS = frozenset({
    "mask", "group", "rewards", "prompt_id", "logp_sampler", "logp_old", "logp_ref", "logp", "entropy",
})  # fmt: skip

#: Numbers of verl's actor that an algorithm replaces -> their defaults.
IGNORED = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
           "loss_agg_mode": "token-mean", "loss_scale_factor": None}  # fmt: skip


def why_not_registries(a: Algorithm) -> str | None:
    """Why the two registries can't carry `a` exactly, or None: they can."""
    for stage in (*a.selection, *a.shaping, a.advantage):
        if missing := sorted(stage.needs - ESTIMATOR_FIELDS):
            return f"{snake(stage)} reads {missing[0]!r}, which an advantage estimator is not given"
        if stage.span >= Scope.STREAM:
            return f"{snake(stage)} keeps state from batch to batch, and an advantage estimator has none"
    if a.advantage.reads_parts:
        return f"{snake(a.advantage)} reads the reward's parts, which an advantage estimator is not given"
    return kenpo.feeds(a, LOSS_FIELDS, Scope.SEQUENCE, LOSS_COUNTS, updates=2, advantages=True)


def why_not_coefficients(a: Algorithm, present: frozenset[str] = BATCH_FIELDS) -> str | None:
    """Why the trainer's whole batch can't carry `a`, or None. ``present``: the fields that the batch holds."""
    return kenpo.feeds(a, present, Scope.BATCH, updates=1)


def route(a: Algorithm) -> str:
    """``"registries"`` where they are enough, else ``"coefficients"``. InputError where neither carries it."""
    first = why_not_registries(a)
    if first is None:
        return "registries"
    if second := why_not_coefficients(a):
        raise InputError(f"verl can't carry {a.name!r}: {second}")
    return "coefficients"


def check_actor(config: Any, name: str) -> None:
    """Raise `InputError` for a knob of verl's actor that `name` replaces and that is not at its default."""
    for knob, default in IGNORED.items():
        value = _get(config, knob, default)
        if value != default:
            raise InputError(
                f"actor.{knob}={value!r}: {name} does not read it; set the algorithm's own numbers "
                f"(my.py:MINE in KENPO_ALGORITHMS) and leave {knob} at {default!r}"
            )


def check_one_step(config: Any, name: str) -> None:
    """Raise `InputError` unless one optimizer step consumes each batch, as coefficients of the whole batch need it."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    updates = _get(actor, "ppo_epochs", 1)
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if updates != 1 or batch != mini:
        raise InputError(
            f"{name}: coefficients of a whole batch are exact for one optimizer step; set actor.ppo_epochs=1 and "
            f"actor.ppo_mini_batch_size={batch} (now {updates} and {mini}), or use an algorithm of the registries"
        )
    correction = _get(algorithm, "rollout_correction", None)
    if correction and _get(correction, "bypass_mode", False):
        raise InputError(
            f"{name}: algorithm.rollout_correction.bypass_mode puts log μ in the place of log π_old; set it to false"
        )
    if _get(algorithm, "use_kl_in_reward", False):
        raise InputError(f"{name}: algorithm.use_kl_in_reward is not read; declare the KL in the algorithm")
    if _get(actor, "entropy_coeff", 0):
        raise InputError(f"{name}: actor.entropy_coeff adds a term of verl's own; declare entropy_bonus instead")
    if _get(actor, "use_kl_loss", False) and _get(actor, "kl_loss_coef", 0.0):
        raise InputError(
            f"{name}: actor.kl_loss_coef adds a KL of verl's own; set it to 0 (use_kl_loss=True alone makes verl score "
            "the reference)"
        )
    if (mode := _get(actor.policy_loss, "loss_mode", None)) != PREFIX + "coefficients":
        raise InputError(f"{name}: actor.policy_loss.loss_mode is {mode!r}; set it to 'kenpo:coefficients'")


def _get(config: Any, name: str, default: Any) -> Any:
    """A field of an OmegaConf node, a dataclass or a namespace."""
    getter = getattr(config, "get", None)
    return getter(name, default) if callable(getter) else getattr(config, name, default)
