"""Everything a run stands on, built in the order in which a mistake is cheapest to find."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kenpo.engines.base import Engine
from kenpo.engines.open import open_engine
from kenpo.engines.room import sampling_room
from kenpo.engines.simulated import sampling_engine
from kenpo.errors import InputError
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.feeding import GIVEN
from kenpo.experience.source import Source
from kenpo.learner.average import proximal_average, sampling_snapshot
from kenpo.learner.critic import COPY, FOLDER, TRUNK, VALUED, Critic, cost, only_values
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.learner.memory import ModelFacts, memory_estimate
from kenpo.learner.optimizer import OptimizerOptions
from kenpo.learner.planning import Passes
from kenpo.learner.teaching import add_teacher, starts_as_it_began
from kenpo.loading import load_object
from kenpo.models.loading import check_ends, check_system, load_model
from kenpo.models.lora import is_adapted, restore_adapter
from kenpo.models.opening import begins_anew, how_loaded, open_policy
from kenpo.models.scorer import Scorer
from kenpo.models.teaching import check_vocabulary
from kenpo.models.templates import set_template
from kenpo.models.value_head import load_heads, new_heads, score_head
from kenpo.ranks import Ranks
from kenpo.runs.checkpoint import load_part, usable
from kenpo.trainer import partner
from kenpo.trainer.config import RunConfig
from kenpo.trainer.plan import load_of, plan_passes
from kenpo.trainer.sources import Inputs, Making, make_source, teacher_evaluator
from kenpo.trainer.update import Updater


@dataclass
class Parts:
    """The working parts of one run on one rank."""

    config: RunConfig
    algorithm: Any
    ranks: Ranks
    model: Any
    tokenizer: Any
    engine: Engine
    source: Source
    updater: Updater
    passes: Passes
    facts: ModelFacts
    teacher: Evaluator | None  # measures the teacher once, before the first step


def build(config: RunConfig, inputs: Inputs, ranks: Ranks, checkpoint: Path | None = None) -> Parts:
    """Load the model (from `checkpoint`, if the run goes on from one) and put the parts together.

    What the source will read is checked against the model here.
    """
    device = config.device
    if device == "cuda" and ranks.size > 1:
        device = f"cuda:{ranks.local}"
    model, tokenizer = open_model(config, device, checkpoint)
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            f"{config.model}: a quantized model, whose weights can't be trained and saved; dequantize it first"
        )
    on_trunk = bool(inputs.algorithm.needs & VALUED) and config.critic in (None, TRUNK)
    found = only_values(load_heads(model, checkpoint or Path(config.model))) if on_trunk else None
    heads = found or (new_heads(model, ("values",)) if on_trunk else None)
    scored = "score" in inputs.algorithm.needs
    heads = score_head(model, checkpoint or Path(config.model)) if scored else heads
    scorer = Scorer(
        model, temperature=config.temperature, packing=config.packing, checkpointing=config.gradient_checkpointing,
        heads=heads, scalars_only=scored and not inputs.algorithm.uses_logp,
    )  # fmt: skip
    facts = ModelFacts.of(scorer)
    partner.check_partner(inputs.algorithm, config)
    passes = plan_passes(inputs.algorithm, config, facts.vocabulary)
    start = average = None
    if passes.reference or starts_as_it_began(config.teacher, inputs.algorithm):
        start = open_reference(config, scorer, device, checkpoint)
    if passes.reference:
        scorer.reference = start
    if config.teacher is not None:
        average = add_teacher(config.teacher, inputs.algorithm, scorer, tokenizer, start, how_loaded(config, device))
    if checkpoint and is_adapted(model):
        restore_adapter(model, checkpoint)
    check_system(tokenizer, config.system)
    check_ends(model, tokenizer, config.stop)
    factory = load_object(config.engine, "engine")[0] if ":" in config.engine else config.engine
    if config.engine == "hf" and (config.source not in GIVEN or inputs.task is not None):
        config = config.but(sampling_tokens=config.sampling_tokens or room(config, model, passes, facts, ranks))
    engine = open_engine(factory, model, tokenizer, config.sampling_tokens, config.server())
    sampler = sampling_engine(config, engine, inputs.algorithm, scorer)
    making = Making(config, inputs, model, tokenizer, sampler, engine, ranks)
    source, teacher = make_source(making), teacher_evaluator(making, scorer.teacher)
    learner = Learner(scorer, learner_options(config, passes), ranks)
    learner.average = average or proximal_average(config.prox_decay, inputs.algorithm, scorer)
    learner.snapshot = sampling_snapshot(inputs.algorithm, scorer, learner.average)
    critic = Critic(learner, fresh=found is None) if on_trunk else None
    if config.critic not in (None, TRUNK):
        critic = open_critic(config, learner, inputs.algorithm, tokenizer, device, checkpoint)
    facts = replace(facts, critic=cost(critic))
    updater = Updater(learner, inputs.algorithm, config, passes, scorer.reference, critic)
    if config.partner is not None:
        theirs = open_model(config.but(model=config.partner), device, checkpoint and checkpoint / partner.FOLDER)
        source = partner.join(making, theirs, source, updater, checkpoint)
    return Parts(config, inputs.algorithm, ranks, model, tokenizer, sampler, source, updater, passes, facts, teacher)


def open_model(config: RunConfig, device: str, checkpoint: Path | None) -> tuple[Any, Any]:
    """Model and tokenizer, from `checkpoint` if there is one, with the run's chat template."""
    with usable(checkpoint) if checkpoint and not begins_anew(config) else contextlib.nullcontext():
        model, tokenizer = open_policy(config, device, str(checkpoint) if checkpoint else None, config.seed)
    set_template(tokenizer, config.template, config.template_args)
    return model, tokenizer


def open_reference(config: RunConfig, scorer: Scorer, device: str, checkpoint: Path | None) -> Scorer:
    """The policy that the run started from, frozen. With an adapter it is the trained model itself."""
    if is_adapted(scorer.model) or not checkpoint:
        return scorer.frozen()
    model = load_model(config.model, trainable=False, **how_loaded(config, device))[0]
    return Scorer(model, temperature=config.temperature, packing=config.packing)


def room(config: RunConfig, model: Any, passes: Passes, facts: ModelFacts, ranks: Ranks) -> int:
    """Tokens that the embedded engine may hold at once: the least that any rank has room for."""
    sizes = memory_estimate(load_of(config, passes), facts)
    return min(ranks.gather(sampling_room(model, config.max_tokens, sizes["gradients"] + sizes["optimizer"])))


def open_critic(
    config: RunConfig, policy: Learner, algorithm: Any, tokenizer: Any, device: str, checkpoint: Path | None
) -> Critic:
    """The critic with a model of its own: with a learner beside the policy's, or frozen where no loss reads values."""
    assert config.critic is not None
    learns = "values" in algorithm.reaches
    part = checkpoint / FOLDER if checkpoint and learns else None
    with usable(checkpoint) if checkpoint else contextlib.nullcontext():
        start = config.model if config.critic == COPY else config.critic
        alike = config.but(model=start, save_adapter=False, lora_rank=config.lora_rank if learns else 0)
        model, theirs = open_model(alike, device, part)
        check_vocabulary(tokenizer, theirs, f"--critic {config.critic}", "a critic")
        heads = only_values(load_heads(model, part or Path(start)))
        if part and is_adapted(model):
            restore_adapter(model, part)
    how: dict[str, Any] = {"packing": config.packing, "scalars_only": True}
    if not learns:
        if heads is None:
            raise InputError(f"--critic {config.critic}: holds no head for values, and {algorithm.name!r} trains none")
        return Critic(policy, frozen=Scorer(model.requires_grad_(False), heads=heads.requires_grad_(False), **how))
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        head.requires_grad_(False)  # it says nothing here
    scorer = Scorer(
        model, heads=heads or new_heads(model, ("values",)), checkpointing=config.gradient_checkpointing, **how
    )
    own = Learner(scorer, replace(policy.options, measured=frozenset()), policy.ranks)
    if checkpoint:
        own.load(load_part(checkpoint, FOLDER))
    return Critic(policy, own, fresh=heads is None)


def learner_options(config: RunConfig, passes: Passes) -> LearnerOptions:
    """The numbers of a learner that the configuration settles."""
    how = OptimizerOptions(config.optimizer, config.betas, config.weight_decay, config.grad_clip)
    return LearnerOptions(config.microbatch_tokens, frozenset({"entropy"} if passes.entropy else ()), how)
