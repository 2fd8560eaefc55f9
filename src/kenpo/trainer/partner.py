"""A second policy beside the run's own: sampled, trained and measured like it, saved in each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kenpo.engines.open import open_engine
from kenpo.errors import InputError
from kenpo.experience.partner import Exchange
from kenpo.experience.source import Source
from kenpo.learner.learner import Learner
from kenpo.models.scorer import Scorer
from kenpo.models.teaching import check_vocabulary
from kenpo.runs.checkpoint import Part, load_part
from kenpo.seeds import stable_seed
from kenpo.stages.base import Scope
from kenpo.trainer.config import RunConfig
from kenpo.trainer.sources import Making, make_source
from kenpo.trainer.update import Updater
from kenpo.types import Rollouts

FOLDER = "partner"  # inside a checkpoint
EXCHANGED = frozenset({"logp_source"})


def check_partner(algorithm: Any, config: RunConfig) -> None:
    """InputError for a partner that nothing reads, for one that is missing, and for what can't be had beside one."""
    reads, name = bool(algorithm.needs & EXCHANGED), algorithm.name
    if config.partner is None:
        if reads:
            raise InputError(f"algorithm {name!r} learns from a second policy's groups; name it: --partner MODEL")
        return
    if not reads:
        raise InputError(
            f"--partner {config.partner}: no stage of {name!r} reads another policy's groups; leave it out"
        )
    for option, given in (
        ("--lora-rank", config.lora_rank), ("--corpus", config.corpus), ("--rephrase", config.rephrase),
        ("--source", config.source not in (None, "on_policy")), ("--engine", config.engine != "hf"),
        ("--lag", config.lag), ("--max-staleness", config.max_staleness is not None),
        ("--sampler-noise", config.sampler_noise), ("--replay", config.replay),
    ):  # fmt: skip
        if given:
            raise InputError(f"{option}: not beside --partner, whose policies sample and train alike; leave it out")
    if algorithm.selection:
        raise InputError(f"--partner: {name!r} selects groups, and both policies need the same ones; leave that out")
    if algorithm.advantage.span == Scope.STREAM:
        raise InputError(f"--partner: the advantage of {name!r} keeps a state, and there is one for one policy only")


def join(making: Making, loaded: tuple[Any, Any], own: Source, updater: Updater, checkpoint: Path | None) -> Source:
    """The source of a run with a partner, whose model and tokenizer are `loaded`; `updater` learns where it is."""
    config, (model, tokenizer) = making.config, loaded
    check_vocabulary(making.tokenizer, tokenizer, f"--partner {config.partner}", "a partner")
    if getattr(tokenizer, "chat_template", None) != getattr(making.tokenizer, "chat_template", None):
        raise InputError(f"--partner {config.partner}: its chat template is another one, so its prompts differ")
    scorer = Scorer(
        model, temperature=config.temperature, packing=config.packing, checkpointing=config.gradient_checkpointing
    )
    engine = open_engine("hf", model, tokenizer, config.sampling_tokens)
    learner = Learner(scorer, replace(updater.learner.options), making.ranks)
    if checkpoint is not None:
        learner.load(load_part(checkpoint, FOLDER))
    twin = Updater(learner, updater.algorithm, config, updater.passes)
    updater.further = lambda: Part(FOLDER, model, scorer.heads, learner.state())
    differs = config.but(seed=stable_seed(config.seed, 0x706172))  # the same problems, other samples
    peer = make_source(Making(differs, making.inputs, model, tokenizer, engine, engine, making.ranks))

    def train(rollouts: Rollouts, step: int) -> Mapping[str, Any]:
        report = twin.update(rollouts, None, step)
        sums = {name: {"sum": total, "count": count} for name, (total, count) in sorted(report.sums.items())}
        return {**sums, **report.extremes, "updates": report.updates}

    return Exchange(
        own, peer, config.group_size, config.correct_at, train, lambda version: engine.update(learner.weights, version)
    )
