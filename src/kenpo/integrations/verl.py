"""Kenpo's algorithms inside verl, by its two registries or by a column of coefficients.

    VERL_USE_EXTERNAL_MODULES=kenpo.integrations.verl KENPO_ALGORITHMS="my.py:MINE" \\
    python -m verl.trainer.main_ppo algorithm.adv_estimator=kenpo:gspo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=kenpo:gspo …

Importing this module registers every algorithm of the catalogue that the registries can carry, and those of
``KENPO_ALGORITHMS``. Anything else takes the trainer ``kenpo``: ``trainer.v1.trainer_mode=kenpo`` with
``algorithm.adv_estimator=kenpo:NAME`` and ``loss_mode=kenpo:coefficients``. See docs/guides/from-verl.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    register_adv_est,
    register_policy_loss,
)

import kenpo
from kenpo.algorithm import Algorithm
from kenpo.errors import InputError
from kenpo.integrations.verl_config import PREFIX, check_actor, route, why_not_registries
from kenpo.types import Rollouts


def place(x: Tensor) -> Tensor:
    """[B,T] with a first column: verl's tensors hold the response alone, and Kenpo's position 0 has no predecessor."""
    return F.pad(x, (1, 0))


def numbered(uid: Sequence[Any]) -> Tensor:
    """[B] each row's group, numbered by first appearance."""
    first: dict[Any, int] = {}
    return torch.tensor([first.setdefault(u, len(first)) for u in uid])


def advantage_of(a: Algorithm) -> Callable[..., tuple[Tensor, Tensor]]:
    """verl's advantage estimator for `a`: shaping and advantage on the whole batch."""

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, index: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        if index is None:
            raise InputError(f"{PREFIX}{a.name}: verl gave no uid, so groups are unknown")
        tokens, group = place(token_level_rewards), numbered(index).to(response_mask.device)
        rollouts = Rollouts(
            mask=place(response_mask).bool(), group=group, rewards=tokens.sum(1), token_rewards=tokens, prompt_id=group
        )
        made = kenpo.prepare(a, rollouts).advantages
        assert made is not None  # an advantage that waits for the policy is refused by `why_not_registries`
        return made[:, 1:], made[:, 1:]

    return estimate


def loss_of(a: Algorithm) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """verl's policy loss for `a`: a microbatch's exact share, times the number of ranks that verl averages over."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str | None = None,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        check_actor(config, PREFIX + a.name)
        if rollout_is_weights is not None:
            raise InputError(
                f"{PREFIX}{a.name}: algorithm.rollout_correction.rollout_is makes weights that are not read; declare a "
                "correction in the algorithm and take the trainer 'kenpo'"
            )
        info = config.global_batch_info
        mask = place(response_mask).bool()
        rollouts = Rollouts(
            mask=mask, group=torch.arange(len(mask), device=mask.device), rewards=advantages.new_zeros(len(mask)),
            logp_old=place(old_log_prob),
        )  # fmt: skip
        totals = {"tokens": info.get("batch_num_tokens"), "sequences": info.get("global_batch_size")}
        if totals["tokens"] is None or totals["sequences"] is None:
            raise InputError(
                f"{PREFIX}{a.name}: verl gave no global token or sequence count (config.global_batch_info)"
            )
        batch = kenpo.given(a, rollouts, place(advantages), totals)
        share = kenpo.objective(a, batch, kenpo.Policy(place(log_prob)))
        return share.loss * info.get("dp_size", 1), _metrics(share.sums)

    return loss


@register_policy_loss(PREFIX + "coefficients")
def given_coefficients(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any = None, **_: Any
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of the trainer ``kenpo``: its ``advantages`` hold d loss / d log-prob of the batch's only step."""
    check_actor(config, PREFIX + "coefficients")
    moved = response_mask.bool() & (advantages != 0)
    loss = (torch.where(moved, log_prob, 0) * advantages).sum()
    return loss * config.global_batch_info.get("dp_size", 1), {}


def coefficient_column(
    a: Algorithm,
    state: Any,
    *,
    uid: Sequence[Any],
    response_mask: Tensor,
    scores: Tensor,
    logp: Tensor,
    logp_sampler: Tensor | None = None,
    logp_ref: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, Any, dict[str, float]]:
    """(d loss / d log-prob [B,T], state, figures) of a whole batch before its only optimizer step.

    All tensors hold the response alone. ``logp``: the trainer's log-probs under the weights that this step will move.
    """
    optional = {"logp_sampler": logp_sampler, "logp_ref": logp_ref}
    fields: dict[str, Any] = {n: place(v) for n, v in optional.items() if v is not None}
    group = numbered(uid)
    rollouts = Rollouts(mask=place(response_mask).bool(), group=group, rewards=scores.sum(1), prompt_id=group, **fields)
    policy = kenpo.Policy(place(logp), entropy=None if entropy is None else place(entropy))
    prepared = kenpo.prepare(a, rollouts, state)
    share, found = kenpo.coefficients(a, kenpo.weigh(a, prepared, policy), policy)
    return found["logp"][:, 1:], prepared.state, _metrics(share.sums)


def _metrics(sums: Any) -> dict[str, float]:
    return {f"kenpo/{name}": float(s / n.clamp_min(1)) for name, (s, n) in sums.items()}


# -- registration ------------------------------------------------------------------------------------------------------


def resolve(name: str) -> Algorithm:
    """The algorithm behind ``kenpo:NAME`` (or NAME). InputError for a name that is none."""
    spec = name.removeprefix(PREFIX)
    known = {a.name: a for a in _own()}
    return known[spec] if spec in known else kenpo.resolve(spec, {}, ())


def _own() -> list[Algorithm]:
    """The user's algorithms, named in ``KENPO_ALGORITHMS``: catalogue names and FILE.py:NAME, separated by spaces."""
    return [kenpo.resolve(spec, {}, ()) for spec in os.environ.get("KENPO_ALGORITHMS", "").split()]


def register(*algorithms: Algorithm) -> dict[str, str]:
    """Put `algorithms` (default: the catalogue and ``KENPO_ALGORITHMS``) into verl's registries. Calling it twice is
    harmless. Returns the reason for each one that they can't carry."""
    refused: dict[str, str] = {}
    for a in algorithms or (*(kenpo.get(n) for n in kenpo.names()), *_own()):
        reason = why_not_registries(a)
        if reason:
            refused[a.name] = reason
            continue
        ADV_ESTIMATOR_REGISTRY.pop(PREFIX + a.name, None)
        register_adv_est(PREFIX + a.name)(advantage_of(a))
        register_policy_loss(PREFIX + a.name)(loss_of(a))
    return refused


def check_registered(name: str) -> str:
    """The route of ``kenpo:NAME`` in this process. InputError, with what to set, where the registries lack it.

    Call it inside a worker: verl loads plug-ins there in silence, and a failed import shows only in a debug log.
    """
    a = resolve(name)
    way = route(a)
    wanted = PREFIX + (a.name if way == "registries" else "coefficients")
    if wanted not in POLICY_LOSS_REGISTRY or (way == "registries" and wanted not in ADV_ESTIMATOR_REGISTRY):
        raise InputError(
            f"{wanted} is not in this process's registries; set VERL_USE_EXTERNAL_MODULES=kenpo.integrations.verl "
            "(and KENPO_ALGORITHMS for algorithms of your own) where workers start"
        )
    return way


def state_file(folder: str, step: int) -> Path:
    """Where the trainer ``kenpo`` keeps an algorithm's state, beside verl's own checkpoint of that step."""
    return Path(folder) / f"global_step_{step}"


REFUSED = register()
