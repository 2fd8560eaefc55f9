"""What a run learns from: opened before a model is loaded, and made into its source once the model is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kenpo
from kenpo.engines.base import Engine
from kenpo.engines.mixture import TeacherEngine
from kenpo.errors import InputError, unknown_name
from kenpo.experience.corpus import WithCorpus
from kenpo.experience.demonstrations import DemonstrationOptions, Demonstrations, FileTexts
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.hints import TEMPLATE, HintedPrompts, HintOptions, Hints
from kenpo.experience.inputs import Inputs, leave_out_long, open_data, reach
from kenpo.experience.mixing import guide_of, mixture_of
from kenpo.experience.pairing import pair_options
from kenpo.experience.preferences import Pairs
from kenpo.experience.previous import Previous
from kenpo.experience.prompts import Prompts
from kenpo.experience.replay import fresh_prompts, with_replay
from kenpo.experience.source import FURTHER, TOP, BatchOptions, OnPolicy, Source
from kenpo.experience.targets import check_targets
from kenpo.experience.tasks import Task
from kenpo.experience.variety import with_variety
from kenpo.learner.preferences import pair_figures
from kenpo.learner.teaching import hint_column, hinted_stage
from kenpo.loading import load_object, try_out
from kenpo.models.loading import context_length, stop_ids
from kenpo.models.scorer import Scorer
from kenpo.ops.tracker import log_prob_drift
from kenpo.ranks import Ranks
from kenpo.trainer.config import RunConfig
from kenpo.trainer.plan import SUPPLIED, check_group_size


@dataclass
class Making:
    """What a source may be made of, on one rank."""

    config: RunConfig
    inputs: Inputs
    model: Any
    tokenizer: Any
    engine: Engine  # makes the training samples
    present: Engine  # samples with the weights of the moment, for evaluation
    ranks: Ranks


@contextlib.contextmanager
def open_inputs(config: RunConfig, show: Callable[[str], None] | None = None) -> Iterator[Inputs]:
    """Algorithm, data and verifier, whose processes end on the way out. InputError for what can't be used.

    `show` is handed what the verifier prints.
    """
    algorithm = resolve_algorithm(config)
    check_group_size(algorithm, config)
    if ":" in config.algorithm:
        try_out(algorithm, config.algorithm, SUPPLIED)
    with open_data(config, config.source, algorithm, show) as inputs:
        yield inputs


def resolve_algorithm(config: RunConfig) -> Any:
    """The algorithm of a resolved configuration: by name or file, whole slots emptied, stages added, numbers set.

    An aggregate over a fixed length takes the response limit where its length is open. Raises `InputError`.
    """
    algorithm = kenpo.resolve(config.algorithm, config.settings, config.stages)
    if algorithm.settings().get("aggregate.length", 0) is None:
        algorithm = algorithm.with_settings({"aggregate.length": config.max_tokens})
    return algorithm


def make_source(making: Making) -> Source:
    """The source that the configuration names, or the user's own: file.py:NAME, called with `Making`."""
    name = making.config.source
    if making.config.long_prompts == "skip" and name not in ("on_policy", "demonstrations"):
        raise InputError(f"--long-prompts skip: rows of the source {name} are not left out by it; leave it out")
    if ":" in name:
        own: Callable[[Making], Source] = load_object(name, "source")[0]
        return own(making)
    if name not in SOURCES:
        raise unknown_name("source", name, SOURCES, "(or your own as file.py:NAME)")
    return SOURCES[name](making)


def on_policy(m: Making) -> Source:
    """Samples of the current policy on a task's problems.

    Prompts of the first batch (of a data file: all that the run can reach) and of the held-out problems are checked.
    """
    task, verifier = m.inputs.task, m.inputs.verifier
    assert task is not None
    assert verifier is not None
    prompts = prompts_of(m, task)
    leave_out_long(m.config, task, prompts)
    problems = [task.train(i) for i in range(reach(m.config, m.config.steps, m.inputs.algorithm, task))]
    prompts.check(problems)
    check_targets(problems, m.inputs.algorithm.needs, m.inputs.algorithm.name)
    options = batch_options(m.config, m.inputs.algorithm)
    hints = hints_of(m, task, prompts)
    ends = stop_ids(m.model, m.tokenizer)
    how, sampling = (
        (m.config, m.inputs.algorithm, prompts),
        m.config.sampling(TOP if "topk_ids" in m.inputs.algorithm.needs else 0),
    )
    mixture = mixture_of(*how, verifier, ends, task, m.engine, sampling, problems)
    guide = guide_of(m.config, m.inputs.algorithm, Hints(prompts, hint_options(m, task)), problems)
    source: Source = OnPolicy(
        task, verifier, m.engine, prompts, m.ranks, options, sampling, evaluator_of(m), hints, mixture, guide
    )
    source = with_variety(source, task, problems)
    if "drift" in m.inputs.algorithm.needs:
        return Previous(source, log_prob_drift)
    replayed = with_replay(source, m.config, m.config.max_staleness, lambda: m.present.version)
    return replayed if m.config.corpus is None else with_corpus(m, replayed, m.config.corpus)


def with_corpus(m: Making, source: Source, corpus: str) -> Source:
    """`source` with rows of a corpus beside its batches."""
    texts = FileTexts(corpus, m.config.prompt_column, m.config.response_column, m.config.seed)
    rows = m.config.corpus_rows or m.config.prompts
    return WithCorpus(source, texts, m.tokenizer, context_length(m.model), rows, m.config.system)


def hints_of(m: Making, task: Task, prompts: Prompts) -> Hints | None:
    """What puts hints beside the samples, its columns checked; None where no teacher is shown one."""
    if m.config.teacher != "hint":
        return None
    hints = Hints(prompts, hint_options(m, task))
    hints.check([task.train(i) for i in range(reach(m.config, m.config.steps, m.inputs.algorithm, task))])
    return hints


def hint_options(m: Making, task: Task) -> HintOptions:
    """Where hints stand, and how they are shown: in words of the configuration, else of the task."""
    template = m.config.hint_template or getattr(task, "hint_template", None) or TEMPLATE
    algorithm = m.inputs.algorithm
    stage = hinted_stage(algorithm)
    return HintOptions(hint_column(algorithm, m.config.hint_column), stage.threshold, template, stage.by == "majority")


def demonstrations(m: Making) -> Source:
    """Prompts with the responses to learn."""
    if not isinstance(m.config.prompts, int) or m.inputs.texts is None:
        raise InputError("demonstrations: no texts were opened")
    options = DemonstrationOptions(
        m.config.prompts, m.config.eval_batch, m.config.system, dtype_of(m.config), m.config.long_prompts == "skip"
    )
    return Demonstrations(m.inputs.texts, m.tokenizer, context_length(m.model), options, evaluator_of(m))


def pairs(m: Making) -> Source:
    """Prompts with a chosen and a rejected response."""
    assert m.inputs.pairs is not None
    options = pair_options(m.config, m.inputs.algorithm, dtype_of(m.config))
    figures = pair_figures(m.inputs.algorithm)
    return Pairs(m.inputs.pairs, m.tokenizer, context_length(m.model), options, figures, evaluator_of(m))


SOURCES: dict[str, Callable[[Making], Source]] = {
    "on_policy": on_policy, "demonstrations": demonstrations, "pairs": pairs,
}  # fmt: skip


def evaluator_of(m: Making) -> Evaluator | None:
    """Greedy accuracy on the task's held-out problems, whose prompts are checked here; None where none is measured."""
    task, verifier = m.inputs.task, m.inputs.verifier
    if task is None or verifier is None or not m.config.eval_problems:
        return None
    heldout, prompts = task.heldout(m.config.eval_problems), prompts_of(m, task)
    prompts.check(heldout)
    return Evaluator(
        heldout, m.present, prompts, verifier, m.ranks, m.config.sampling(),
        correct_at=m.config.correct_at, batch=m.config.eval_batch,
    )  # fmt: skip


def teacher_evaluator(m: Making, teacher: Scorer | None) -> Evaluator | None:
    """What measures the teacher's own greedy accuracy on the held-out problems, each read as it reads them. None where
    nothing is held out, or held-out problems have no hint."""
    task, verifier, config = m.inputs.task, m.inputs.verifier, m.config
    if teacher is None or task is None or verifier is None or not config.eval_problems:
        return None
    prompts, heldout = prompts_of(m, task), task.heldout(config.eval_problems)
    hints = hints_of(m, task, prompts)
    if hints is not None and not all(hints.options.column and p.extra.get(hints.options.column) for p in heldout):
        return None
    return Evaluator(
        heldout, TeacherEngine(teacher, m.tokenizer),
        prompts if hints is None else HintedPrompts(hints), verifier, m.ranks, config.sampling(),
        correct_at=config.correct_at, batch=config.eval_batch,
    )  # fmt: skip


def prompts_of(m: Making, task: Task) -> Prompts:
    """The task's problems as this model's ids."""
    return Prompts(m.model, m.tokenizer, m.config.system or task.system, m.config.max_tokens)


def batch_options(config: RunConfig, algorithm: Any) -> BatchOptions:
    """How a batch is filled."""
    return BatchOptions(
        fresh_prompts(config), config.group_size, config.max_refills, config.refill, seed=config.seed,
        correct_at=config.correct_at, baseline="baseline" in algorithm.needs, dtype=dtype_of(config),
        also=tuple(sorted(algorithm.needs & FURTHER)), prioritised=algorithm.advantage.prioritises,
    )  # fmt: skip


def dtype_of(config: RunConfig) -> torch.dtype:
    """Of what is recorded about samples."""
    return torch.float64 if config.dtype == "float64" else torch.float32
