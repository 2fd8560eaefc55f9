"""Everything a run stands on, built in the order in which a mistake is cheapest to find."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import kenpo
from kenpo.engines.hf import HFEngine
from kenpo.errors import InputError
from kenpo.experience.tasks import Task, load_task
from kenpo.experience.verifiers import Verifier, load_verifier
from kenpo.models.loading import load_model
from kenpo.trainer.collect import Collector, sampling_options
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.distributed import Ranks
from kenpo.trainer.evaluate import Evaluator
from kenpo.trainer.plan import ModelFacts, Passes, check_group_size, plan_passes
from kenpo.trainer.prompts import Prompts
from kenpo.trainer.step import Updater


@dataclass
class Parts:
    """The working parts of one run on one rank."""

    config: TrainConfig
    algorithm: Any
    ranks: Ranks
    model: Any
    tokenizer: Any
    engine: HFEngine
    collector: Collector
    updater: Updater
    evaluator: Evaluator | None
    passes: Passes
    facts: ModelFacts


def resolve_algorithm(config: TrainConfig) -> Any:
    """The algorithm of a resolved configuration: by name or file, whole slots emptied, stages added, numbers set.

    An aggregate over a fixed length takes the response limit where its length is open. Raises `InputError`.
    """
    settings = config.settings or {}
    emptied = {k: v for k, v in settings.items() if "." not in k}
    numbers = {k: v for k, v in settings.items() if "." in k}
    algorithm = kenpo.resolve(config.algorithm, emptied)
    for name in config.stages:
        algorithm = algorithm.adding(name)
    if numbers:
        algorithm = algorithm.with_settings(numbers)
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
def open_inputs(config: TrainConfig) -> Iterator[Inputs]:
    """Algorithm, task and verifier, whose processes end on the way out. InputError for what can't be used."""
    algorithm = resolve_algorithm(config)
    check_group_size(algorithm, config)
    task = load_task(
        config.task, seed=config.seed, prompt_column=config.prompt_column, answer_column=config.answer_column,
        heldout=config.eval_problems, eval_file=config.eval_file, system=config.system,
    )  # fmt: skip
    task.train(0)
    with load_verifier(config.verifier or task.verifier, task=task, time_limit=config.time_limit) as verifier:
        yield Inputs(algorithm, task, verifier)


def build(config: TrainConfig, inputs: Inputs, ranks: Ranks, checkpoint: Path | None = None) -> Parts:
    """Load the model (from `checkpoint`, if the run goes on from one) and put the parts together.

    Prompts of the first batch and of the held-out problems are checked against the model's context here.
    """
    device = config.device or "cpu"
    if device == "cuda" and ranks.size > 1:
        device = f"cuda:{ranks.local}"
    model, tokenizer = load_model(str(checkpoint or config.model), dtype=config.dtype, device=device)
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            f"{config.model}: a quantized model, whose weights can't be trained and saved; dequantize it first"
        )
    facts = ModelFacts.of(model)
    passes = plan_passes(inputs.algorithm, config, facts.vocabulary)
    reference = None
    if passes.reference:
        reference = (
            load_model(config.model, dtype=config.dtype, device=device)[0] if checkpoint else copy.deepcopy(model)
        )
        reference.requires_grad_(False)
    assert config.max_tokens is not None
    assert config.prompts is not None
    prompts = Prompts(model, tokenizer, config.system or inputs.task.system, config.max_tokens)
    prompts.check(inputs.task.train(i) for i in range(config.prompts))
    engine = HFEngine(model, tokenizer)
    evaluator = None
    if config.eval_problems:
        heldout = inputs.task.heldout(config.eval_problems)
        prompts.check(heldout)
        evaluator = Evaluator(
            heldout, engine, prompts, inputs.verifier, ranks, replace(sampling_options(config)),
            correct_at=config.correct_at, batch=config.eval_batch,
        )  # fmt: skip
    collector = Collector(config, inputs.algorithm, inputs.task, inputs.verifier, engine, prompts, ranks)
    updater = Updater(model, inputs.algorithm, config, passes, ranks, reference)
    return Parts(
        config, inputs.algorithm, ranks, model, tokenizer, engine, collector, updater, evaluator, passes, facts
    )


def settle_torch(config: TrainConfig) -> None:
    """Fix the thread count and, on a GPU, ask for deterministic kernels."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    if (config.device or "").startswith("cuda"):
        import os

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
