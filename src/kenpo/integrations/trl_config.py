"""What of TRL's `GRPOConfig` an algorithm replaces, and what TRL can't do with one: refused before a model loads.

Nothing here imports TRL: a configuration is read by attribute, so that the table is tested without the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import kenpo
from kenpo.algorithm import Algorithm
from kenpo.errors import InputError
from kenpo.stages.base import Scope, snake

#: Releases of TRL that these classes were tested with.
TESTED = ">=1.16,<1.17"

#: Fields of Rollouts and Policy that TRL's trainer can fill.
SUPPLIED = frozenset({
    "mask", "group", "rewards", "tokens", "prompt_id", "truncated", "policy_version", "reward_parts", "logp_sampler",
    "logp_old", "logp_ref", "logp", "entropy",
})  # fmt: skip

#: Knobs that a declaration replaces -> what takes their place. Refused unless they stand at TRL's default.
REPLACED: dict[str, str] = {
    "loss_type": "the algorithm's surrogate and aggregate",
    "epsilon": "surrogate.low",
    "epsilon_high": "surrogate.high",
    "delta": "surrogate (dual_clip has a cap)",
    "importance_sampling_level": "the ratio (token_ratio or sequence_ratio)",
    "scale_rewards": "the advantage (group_z_score, group_centred …)",
    "beta": "regularizers.kl_to_reference.beta",
    "sapo_temperature_neg": "surrogate.tau_neg of sapo",
    "sapo_temperature_pos": "surrogate.tau_pos of sapo",
    "vespo_k_pos": "an algorithm of your own",
    "vespo_k_neg": "an algorithm of your own",
    "vespo_lambda_pos": "an algorithm of your own",
    "vespo_lambda_neg": "an algorithm of your own",
    "multi_objective_aggregation": "the advantage (parts_z_score normalises each reward)",
    "top_entropy_quantile": "a weight of your own",
    "entropy_coef": "regularizers.entropy_bonus.coef",
    "use_adaptive_entropy": "a regularizer of your own",
    "off_policy_mask_threshold": "the weight off_policy_sequences",
    "use_bias_correction_kl": "regularizers.kl_to_reference.estimator",
    "mask_truncated_completions": "the weight untruncated",
    "vllm_importance_sampling_mode": "a correction (truncated_is, masked_is)",
    "vllm_importance_sampling_clip_max": "a correction's cap",
    "vllm_importance_sampling_clip_min": "a correction's floor",
}

#: Knobs that restrict or reweigh sampling -> the value that leaves it alone. TRL's log-probs don't follow them.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_k": (0, None), "top_p": (1.0, None), "min_p": (None, 0.0), "repetition_penalty": (1.0, None),
}  # fmt: skip


def check_config(args: Any, defaults: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Raise `InputError` naming the first knob of `args` that can't stand beside `algorithm`.

    `defaults` holds TRL's own defaults by name (`defaults_of`).
    """
    for name, instead in REPLACED.items():
        if name in defaults and not _same(getattr(args, name, defaults[name]), defaults[name]):
            raise InputError(
                f"GRPOConfig({name}={getattr(args, name)!r}): {algorithm.name!r} does not read it; its place is taken "
                f"by {instead}: change it with settings={{…}} or an algorithm of your own, and leave {name} out"
            )
    for name, neutral in SAMPLING.items():
        if getattr(args, name, neutral[0]) not in neutral:
            raise InputError(
                f"GRPOConfig({name}={getattr(args, name)!r}): TRL's log-probs ignore it, so ratios would be those of "
                "another distribution; leave it out"
            )
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise InputError(f"GRPOConfig({name}=…): not tested with Kenpo; train on one process or with DDP")
    if getattr(args, "router_aux_loss_coef", None):
        raise InputError("GRPOConfig(router_aux_loss_coef=…): a router loss beside the algorithm's is not supported")
    for name in SAMPLING:
        if (given := (getattr(args, "generation_kwargs", None) or {}).get(name)) not in (*SAMPLING[name], None):
            raise InputError(
                f"GRPOConfig(generation_kwargs={{{name!r}: {given!r}}}): TRL's log-probs ignore it; leave it out"
            )


def check_windows(args: Any, algorithm: Algorithm) -> None:
    """Raise `InputError` unless every optimizer step takes whole microbatches of one generation."""
    steps, window = args.steps_per_generation, args.gradient_accumulation_steps
    if steps % window:
        raise InputError(
            f"steps_per_generation {steps} is no multiple of gradient_accumulation_steps {window}: an optimizer step "
            "would span two generations, whose totals are not known at its first microbatch; "
            f"set steps_per_generation to {window * math.ceil(steps / window)}"
        )
    updates = args.num_iterations * steps // window
    if algorithm.updates is not None and updates > algorithm.updates:
        raise InputError(
            f"{algorithm.name!r} takes at most {algorithm.updates} update(s) per generation; num_iterations "
            f"{args.num_iterations} and steps_per_generation {steps} over gradient_accumulation_steps {window} make "
            f"{updates}; set num_iterations=1 and steps_per_generation={window}"
        )
    rows = args.per_device_train_batch_size * window
    if steps > window and coupled(algorithm) and rows % args.num_generations:
        raise InputError(
            f"{coupled(algorithm)} of {algorithm.name!r} must see whole groups, but an optimizer step takes {rows} "
            f"rows a process and a group holds {args.num_generations}; make per_device_train_batch_size × "
            "gradient_accumulation_steps a multiple of num_generations"
        )


def check_fed(algorithm: Algorithm, args: Any) -> None:
    """Raise `InputError` if a stage reads what TRL's trainer can't fill."""
    updates = args.num_iterations * args.steps_per_generation // args.gradient_accumulation_steps
    if reason := kenpo.feeds(algorithm, SUPPLIED, Scope.BATCH, updates=updates):
        raise InputError(f"{algorithm.name!r} can't run under TRL's trainer: {reason}")


def coupled(algorithm: Algorithm) -> str | None:
    """The first stage that sees a group or more of one optimizer step, or None."""
    late = algorithm.advantage if algorithm.advantage.policy_needs else None
    parts = (*algorithm.weights, late, algorithm.ratio, algorithm.surrogate, *algorithm.regularizers)
    return next((snake(s) for s in parts if s is not None and s.span >= Scope.GROUP), None)


def with_length(algorithm: Algorithm, length: int | None) -> Algorithm:
    """An open `FixedLength` takes the response limit. Raises `InputError` where there is none."""
    if algorithm.settings().get("aggregate.length", 0) is not None:
        return algorithm
    if length is None:
        raise InputError(f"{algorithm.name!r}: aggregate.length is open; set it, or max_completion_length")
    return algorithm.with_settings({"aggregate.length": length})


def defaults_of(config: type) -> dict[str, Any]:
    """The default of every field of a configuration class."""
    made = {}
    for f in dataclasses.fields(config):
        if f.default is not dataclasses.MISSING:
            made[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            made[f.name] = f.default_factory()
    return made


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):  # scale_rewards: True means "group"
        return value in (default, "group") if default is True else value == default
    return value == default
