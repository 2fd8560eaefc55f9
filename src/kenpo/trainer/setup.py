"""Everything a run stands on, built in the order in which a mistake is cheapest to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kenpo
from kenpo.engines.base import Engine, SamplingOptions
from kenpo.engines.open import open_engine
from kenpo.errors import InputError
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.prompts import Prompts
from kenpo.experience.source import BatchOptions, OnPolicy, Source
from kenpo.experience.tasks import Task, load_task
from kenpo.experience.verdict import Verifier
from kenpo.experience.verifiers import load_verifier
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.learner.optimizer import OptimizerOptions
from kenpo.loading import load_object
from kenpo.models.loading import check_system, load_model
from kenpo.models.lora import add_adapter, is_adapted, is_adapter, restore_adapter
from kenpo.models.scorer import Scorer
from kenpo.ranks import Ranks
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.plan import SUPPLIED, ModelFacts, Passes, check_group_size, plan_passes
from kenpo.trainer.update import Updater


@dataclass
class Parts:
    """The working parts of one run on one rank."""

    config: TrainConfig
    algorithm: Any
    ranks: Ranks
    model: Any
    tokenizer: Any
    engine: Engine
    source: Source
    updater: Updater
    passes: Passes
    facts: ModelFacts


def resolve_algorithm(config: TrainConfig) -> Any:
    """The algorithm of a resolved configuration: by name or file, whole slots emptied, stages added, numbers set.

    An aggregate over a fixed length takes the response limit where its length is open. Raises `InputError`.
    """
    algorithm = kenpo.resolve(config.algorithm, config.settings, config.stages)
    if algorithm.settings().get("aggregate.length", 0) is None:
        algorithm = algorithm.with_settings({"aggregate.length": config.max_tokens})
    return algorithm


@dataclass
class Inputs:
    """What can be checked without loading a model."""

    algorithm: Any
    task: Task
    verifier: Verifier


@contextlib.contextmanager
def open_inputs(config: TrainConfig, show: Callable[[str], None] | None = None) -> Iterator[Inputs]:
    """Algorithm, task and verifier, whose processes end on the way out. InputError for what can't be used.

    `show` is handed what the verifier prints.
    """
    algorithm = resolve_algorithm(config)
    check_group_size(algorithm, config)
    if ":" in config.algorithm:
        try_out(algorithm, config.algorithm)
    task = load_task(
        config.task, seed=config.seed, prompt_column=config.prompt_column, answer_column=config.answer_column,
        heldout=config.eval_problems, eval_file=config.eval_file, system=config.system,
    )  # fmt: skip
    task.train(0)
    with load_verifier(
        config.verifier or task.verifier, task=task, time_limit=config.time_limit, workers=config.verifier_workers,
        memory=config.verifier_memory, sandbox=config.sandbox, show=show, answer_column=config.answer_column,
    ) as verifier:  # fmt: skip
        yield Inputs(algorithm, task, verifier)


def try_out(algorithm: Any, spec: str) -> None:
    """Run the user's own algorithm once on four made-up rollouts, so that a fault in it shows before a model loads.

    Raises `InputError` naming the exception. Fields the trainer does not supply are left to the planner.
    """
    if not algorithm.needs <= SUPPLIED:
        return
    mask = torch.tensor([[False, True, True, True]] * 4)
    logp = torch.full(mask.shape, -1.0) - 0.1 * torch.arange(4)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.tensor([0, 0, 1, 1]), rewards=rewards,
        reward_parts=dict.fromkeys(getattr(algorithm.advantage, "parts", None) or ("part",), rewards),
        tokens=torch.arange(16).reshape(4, 4), prompt_id=torch.tensor([0, 0, 1, 1]), answer=torch.tensor([0, 1, 0, 1]),
        truncated=torch.zeros(4, dtype=torch.bool), logp_sampler=logp, logp_old=logp + 0.1, logp_ref=logp - 0.1,
    )  # fmt: skip
    policy = kenpo.Policy(logp, entropy=torch.full(mask.shape, 1.0), kl_ref=torch.full(mask.shape, 0.1))
    try:
        result = kenpo.evaluate(algorithm, rollouts, policy)
    except Exception as error:  # whatever the user's stage raises
        raise InputError(f"algorithm {spec!r} fails on a small batch: {type(error).__name__}: {error}") from error
    if not bool(result.coefficients.isfinite().all()):
        raise InputError(f"algorithm {spec!r} gives NaN or infinite coefficients on a small batch of ordinary numbers")


def reach(config: TrainConfig, inputs: Inputs) -> int:
    """How many problems are looked at before anything is sampled: a file's rows as far as the run may get, else one
    batch of an endless task."""
    assert config.prompts is not None
    assert config.steps is not None
    if inputs.task.size is None:
        return config.prompts
    rounds = 1 + (config.max_refills if inputs.algorithm.selection else 0)
    return max(config.prompts, min(inputs.task.size, config.steps * config.prompts * rounds))


def build(config: TrainConfig, inputs: Inputs, ranks: Ranks, checkpoint: Path | None = None) -> Parts:
    """Load the model (from `checkpoint`, if the run goes on from one) and put the parts together.

    Prompts of the first batch (of a data file: all that the run can reach) and of the held-out problems are checked
    against the model's context here.
    """
    device = config.device or "cpu"
    if device == "cuda" and ranks.size > 1:
        device = f"cuda:{ranks.local}"
    model, tokenizer = open_model(config, device, checkpoint)
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            f"{config.model}: a quantized model, whose weights can't be trained and saved; dequantize it first"
        )
    scorer = Scorer(
        model, temperature=config.temperature, packing=config.packing, checkpointing=config.gradient_checkpointing
    )
    facts = ModelFacts.of(scorer)
    passes = plan_passes(inputs.algorithm, config, facts.vocabulary)
    if passes.reference:
        scorer.reference = open_reference(config, scorer, device, checkpoint)
    if checkpoint and is_adapted(model):
        restore_adapter(model, checkpoint)
    assert config.max_tokens is not None
    assert config.prompts is not None
    check_system(tokenizer, config.system)
    prompts = Prompts(model, tokenizer, config.system or inputs.task.system, config.max_tokens)
    prompts.check(inputs.task.train(i) for i in range(reach(config, inputs)))
    factory = load_object(config.engine, "engine")[0] if ":" in config.engine else config.engine
    engine = open_engine(factory, model, tokenizer)
    evaluator = None
    sampling = sampling_options(config)
    if config.eval_problems:
        heldout = inputs.task.heldout(config.eval_problems)
        prompts.check(heldout)
        evaluator = Evaluator(
            heldout, engine, prompts, inputs.verifier, ranks, sampling,
            correct_at=config.correct_at, batch=config.eval_batch,
        )  # fmt: skip
    options = batch_options(config, inputs.algorithm)
    source = OnPolicy(inputs.task, inputs.verifier, engine, prompts, ranks, options, sampling, evaluator)
    learner = Learner(scorer, learner_options(config, passes), ranks)
    updater = Updater(learner, inputs.algorithm, config, passes, scorer.reference)
    return Parts(config, inputs.algorithm, ranks, model, tokenizer, engine, source, updater, passes, facts)


def sampling_options(config: TrainConfig) -> SamplingOptions:
    """How training samples are drawn."""
    assert config.max_tokens is not None
    return SamplingOptions(
        config.temperature, config.top_p, config.top_k, config.max_tokens, config.stop, config.keep_special_tokens
    )


def batch_options(config: TrainConfig, algorithm: Any) -> BatchOptions:
    """How a batch is filled."""
    assert config.prompts is not None
    assert config.group_size is not None
    return BatchOptions(
        prompts=config.prompts, group_size=config.group_size, max_refills=config.max_refills, refill=config.refill,
        seed=config.seed, correct_at=config.correct_at, baseline="baseline" in algorithm.needs,
        dtype=torch.float64 if config.dtype == "float64" else torch.float32,
    )  # fmt: skip


def open_model(config: TrainConfig, device: str, checkpoint: Path | None) -> tuple[Any, Any]:
    """Model and tokenizer, from `checkpoint` if there is one. With an adapter always as the run began: what it was
    trained to is taken up after the reference has been made of it."""
    started = bool(config.lora_rank) or is_adapter(config.model)
    if config.save_adapter and not started:
        raise InputError(
            "--save-adapter: there is no adapter; give --lora-rank, or a --model that is an adapter's folder"
        )
    if config.lora_rank and is_adapter(config.model):
        raise InputError(f"--lora-rank: {config.model} is an adapter already and goes on being trained; leave it out")
    source = config.model if started else str(checkpoint or config.model)
    model, tokenizer = load_model(source, **how_loaded(config, device))
    if config.lora_rank:
        assert config.lora_alpha is not None
        add_adapter(model, config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets, seed=config.seed)
    return model, tokenizer


def open_reference(config: TrainConfig, scorer: Scorer, device: str, checkpoint: Path | None) -> Scorer:
    """The policy that the run started from, frozen. With an adapter it is the trained model itself."""
    if is_adapted(scorer.model) or not checkpoint:
        return scorer.frozen()
    model = load_model(config.model, trainable=False, **how_loaded(config, device))[0]
    return Scorer(model, temperature=config.temperature, packing=config.packing)


def learner_options(config: TrainConfig, passes: Passes) -> LearnerOptions:
    """The numbers of a learner that the configuration settles."""
    assert config.betas is not None
    how = OptimizerOptions(config.optimizer, config.betas, config.weight_decay, config.grad_clip)
    return LearnerOptions(config.microbatch_tokens, frozenset({"entropy"} if passes.entropy else ()), how)


def how_loaded(config: TrainConfig, device: str) -> dict[str, Any]:
    """The arguments of `load_model` that the configuration settles."""
    return {
        "dtype": config.dtype, "device": device, "head_dtype": config.head_dtype, "attention": config.attention,
    }  # fmt: skip


def settle_torch(config: TrainConfig) -> None:
    """Fix the thread count, on a GPU ask for deterministic kernels."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    if (config.device or "").startswith("cuda"):
        import os

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
