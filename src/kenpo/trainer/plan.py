"""What a run's configuration comes to with its algorithm: the passes of a step, what it holds, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

from kenpo import schedules
from kenpo.engines.simulated import check_sampling
from kenpo.errors import InputError
from kenpo.experience.corpus import check_corpus
from kenpo.experience.mixing import MIXED, check_mixing
from kenpo.experience.pairing import keeps_reference, supplied_by
from kenpo.experience.replay import check_replay
from kenpo.learner import acting, critic, planning
from kenpo.learner.average import check_decay
from kenpo.learner.critic import VALUED
from kenpo.learner.memory import Load, ModelFacts, memory_estimate
from kenpo.learner.planning import Passes, who
from kenpo.learner.teaching import TAUGHT, check_teacher
from kenpo.stages.base import Scope, snake
from kenpo.trainer.config import RunConfig

SUPPLIED = frozenset({
    "hinted", "mask", "group", "rewards", "tokens", "prompt_id", "answer", "logp_sampler", "logp_old", "logp_ref",
    "logp_prox", "topk_ids", "topk_logp", "topk_logp_sampler", "topk_logp_old", "kl_sampler", "prompt_mask", "drift",
    "target_ids", "target_prob", "policy_version", "baseline", "prefix", "truncated", "support_ids", "logp", "entropy",
    "kl_ref",
})  # fmt: skip


def plan_passes(algorithm: Any, config: RunConfig, vocabulary: int) -> Passes:
    """Decide the passes. InputError for a stage that needs a field this trainer does not supply."""
    check_teacher(algorithm, config, config.group_size)
    check_sampling(config, config.source, config.updates, algorithm.needs)
    tracks = algorithm.advantage.span == Scope.STREAM
    check_replay(config, config.source, config.minibatches, algorithm.name if tracks else None)
    check_decay(config.prox_decay, algorithm)
    critic.check(algorithm, config.critic, config.critic_lr, config.critic_warmup, config.steps)
    check_mixing(algorithm, config)
    check_corpus(algorithm, config.corpus, config.corpus_rows, config.source)
    for name in sorted(algorithm.needs - SUPPLIED - TAUGHT - VALUED - MIXED - supplied_by(config)):
        raise InputError(
            f"algorithm {algorithm.name!r} reads {name!r} ({who(algorithm, name)}), which `kenpo train` does not "
            "supply; put it into kenpo.Rollouts or kenpo.Policy in a loop of your own"
        )
    if algorithm.updates is not None and config.updates > algorithm.updates:
        raise InputError(
            f"algorithm {algorithm.name!r} takes at most {algorithm.updates} update(s) per rollout batch, but "
            f"--minibatches {config.minibatches} --epochs {config.epochs} make {config.updates}"
        )
    schedules.check(algorithm, config.moving)
    kept, partner = keeps_reference(config, algorithm.needs), config.partner is not None
    return planning.plan(algorithm, config.updates, vocabulary, kept_reference=kept, partner=partner)


def check_group_size(algorithm: Any, config: RunConfig) -> None:
    """InputError for groups of one under an advantage, selection or shaping that compares the members of a group."""
    if config.group_size != 1:
        return
    for stage in (algorithm.advantage, *algorithm.selection, *algorithm.shaping):
        if stage.span == Scope.GROUP:
            raise InputError(
                f"--group-size 1: {snake(stage)} of {algorithm.name!r} compares the samples of a group, "
                "and a group of one has nothing to compare; use at least 2, or an algorithm with another advantage"
            )


def notes(algorithm: Any, config: RunConfig) -> list[str]:
    """What a run says of itself before its first step."""
    stale = config.lag > 0 or config.replay is not None
    foreign = config.engine != "hf" or config.sampler_noise is not None
    return acting.notes(algorithm, config.updates, stale, foreign, config.deterministic == "on")


def load_of(config: RunConfig, passes: Passes) -> Load:
    """What a step holds at once."""
    sampled = min(config.prompts * config.group_size * config.max_tokens, config.sampling_tokens or sys.maxsize)
    return Load(
        config.microbatch_tokens, sampled, config.optimizer, passes.reference, passes.entropy,
        config.gradient_checkpointing,
    )  # fmt: skip


def checkpoint_room(config: RunConfig, passes: Passes, facts: ModelFacts) -> tuple[int, int]:
    """How many checkpoints lie on the disk at once at most, and the bytes of one: weights, moments, masters."""
    every = config.checkpoint_every or config.steps
    number = -(-config.steps // every)
    weights = (facts.trainable if config.save_adapter else facts.parameters) * facts.bytes_each
    moments = memory_estimate(load_of(config, passes), facts)["optimizer"]
    return min(number, config.keep + 1) if config.keep else number, weights + moments
