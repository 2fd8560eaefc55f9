"""What a run learns from: opened before a model is loaded, and made into its source once the model is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kenpo
from kenpo.engines.base import Engine, SamplingOptions
from kenpo.engines.mixture import TeacherEngine
from kenpo.errors import InputError, unknown_name
from kenpo.experience.addition import DROPPED_CARRY
from kenpo.experience.corpus import WithCorpus
from kenpo.experience.demonstrations import AdditionTexts, DemonstrationOptions, Demonstrations, FileTexts, Texts
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.feeding import GIVEN
from kenpo.experience.files import FileTask
from kenpo.experience.hints import TEMPLATE, HintedPrompts, HintOptions, Hints
from kenpo.experience.mixing import guide_of, mixture_of
from kenpo.experience.options import BUNDLED_TASK
from kenpo.experience.pairing import open_pairs, pair_options
from kenpo.experience.pairs import PairStream
from kenpo.experience.preferences import Pairs
from kenpo.experience.prompts import Prompts
from kenpo.experience.shards import Spec
from kenpo.experience.source import BatchOptions, OnPolicy, Source
from kenpo.experience.tasks import Task, load_task
from kenpo.experience.verdict import Verifier
from kenpo.experience.verifiers import load_verifier
from kenpo.learner.preferences import pair_figures
from kenpo.learner.teaching import hint_column, hinted_stage
from kenpo.loading import load_object, try_out
from kenpo.models.loading import context_length, stop_ids
from kenpo.models.scorer import Scorer
from kenpo.ranks import Ranks
from kenpo.trainer.config import RunConfig
from kenpo.trainer.plan import SUPPLIED, check_group_size


@dataclass
class Inputs:
    """What can be checked without loading a model. ``texts`` are demonstrations, ``pairs`` preferences; a run on them
    has a task, and a verifier, only if it measures accuracy on one."""

    algorithm: Any
    task: Task | None = None
    verifier: Verifier | None = None
    texts: Texts | None = None
    pairs: PairStream | None = None


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
    inputs = Inputs(resolve_algorithm(config))
    check_group_size(inputs.algorithm, config)
    if ":" in config.algorithm:
        try_out(inputs.algorithm, config.algorithm, SUPPLIED)
    spec: Spec | None = config.task
    if config.source == "demonstrations":
        inputs.texts, spec = open_texts(config), config.eval_task
    elif config.source == "pairs":
        inputs.pairs, spec = open_pairs(config, inputs.algorithm), config.eval_task
    if spec is None or (config.source in GIVEN and not config.eval_problems):
        yield inputs
        return
    inputs.task = open_task(config, spec)
    with load_verifier(
        config.verifier or inputs.task.verifier, task=inputs.task, time_limit=config.time_limit,
        workers=config.verifier_workers, memory=config.verifier_memory, sandbox=config.sandbox, show=show,
        answer_column=config.answer_column,
    ) as inputs.verifier:  # fmt: skip
        yield inputs


def open_task(config: RunConfig, spec: Spec) -> Task:
    """The task of an ordinary run, or the one on which a run on demonstrations measures accuracy."""
    if config.source in GIVEN:
        return load_task(spec, seed=config.seed, heldout=config.eval_problems, system=config.system)
    task = load_task(
        spec, seed=config.seed, prompt_column=config.prompt_column, answer_column=config.answer_column,
        heldout=config.eval_problems, eval_file=config.eval_file, system=config.system,
    )  # fmt: skip
    task.train(0)
    return task


def open_texts(config: RunConfig) -> Texts:
    """The demonstrations of a run."""
    if config.task == BUNDLED_TASK:
        return AdditionTexts(config.seed, DROPPED_CARRY if config.dropped_carry is None else config.dropped_carry)
    return FileTexts(
        config.task, config.prompt_column, config.response_column, config.seed, config.eval_problems, config.eval_file
    )


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
    problems = [task.train(i) for i in range(reach(m.config, m.inputs.algorithm, task))]
    prompts.check(problems)
    options = batch_options(m.config, m.inputs.algorithm)
    hints = hints_of(m, task, prompts)
    ends = stop_ids(m.model, m.tokenizer)
    how, sampling = (m.config, m.inputs.algorithm, prompts), sampling_options(m.config)
    mixture = mixture_of(*how, verifier, ends, task, m.engine, sampling, problems)
    guide = guide_of(m.config, m.inputs.algorithm, Hints(prompts, hint_options(m, task)), problems)
    source = OnPolicy(
        task, verifier, m.engine, prompts, m.ranks, options, sampling, evaluator_of(m), hints, mixture, guide
    )
    return source if m.config.corpus is None else with_corpus(m, source, m.config.corpus)


def with_corpus(m: Making, source: Source, corpus: str) -> Source:
    """`source` with rows of a corpus beside its batches."""
    texts = FileTexts(corpus, m.config.prompt_column, m.config.response_column, m.config.seed)
    rows = m.config.corpus_rows or m.config.prompts
    return WithCorpus(source, texts, m.tokenizer, context_length(m.model), rows, m.config.system)


def leave_out_long(config: RunConfig, task: Task, prompts: Prompts) -> None:
    """Leave rows out that the model's context has no room for, if that is asked for. InputError for an endless task."""
    if config.long_prompts == "refuse":
        return
    if not isinstance(task, FileTask):
        raise InputError(f"--long-prompts skip: the problems of {task.name} are made one by one; it is for data files")
    task.leave_out(prompts.too_long, f"leaves no room for a response in the context of {prompts.context}")


def hints_of(m: Making, task: Task, prompts: Prompts) -> Hints | None:
    """What puts hints beside the samples, its columns checked; None where no teacher is shown one."""
    if m.config.teacher != "hint":
        return None
    hints = Hints(prompts, hint_options(m, task))
    hints.check([task.train(i) for i in range(reach(m.config, m.inputs.algorithm, task))])
    return hints


def hint_options(m: Making, task: Task) -> HintOptions:
    """Where hints stand, and how they are shown: in words of the configuration, else of the task."""
    template = m.config.hint_template or getattr(task, "hint_template", None) or TEMPLATE
    algorithm = m.inputs.algorithm
    return HintOptions(hint_column(algorithm, m.config.hint_column), hinted_stage(algorithm).threshold, template)


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


def reach(config: RunConfig, algorithm: Any, task: Task) -> int:
    """How many problems are looked at before anything is sampled: a file's rows as far as the run may get, else one
    batch of an endless task."""
    if task.size is None:
        return config.prompts
    rounds = 1 + (config.max_refills if algorithm.selection else 0)
    return max(config.prompts, min(task.size, config.steps * config.prompts * rounds))


def evaluator_of(m: Making) -> Evaluator | None:
    """Greedy accuracy on the task's held-out problems, whose prompts are checked here; None where none is measured."""
    task, verifier = m.inputs.task, m.inputs.verifier
    if task is None or verifier is None or not m.config.eval_problems:
        return None
    heldout, prompts = task.heldout(m.config.eval_problems), prompts_of(m, task)
    prompts.check(heldout)
    return Evaluator(
        heldout, m.present, prompts, verifier, m.ranks, sampling_options(m.config),
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
        prompts if hints is None else HintedPrompts(hints), verifier, m.ranks, sampling_options(config),
        correct_at=config.correct_at, batch=config.eval_batch,
    )  # fmt: skip


def prompts_of(m: Making, task: Task) -> Prompts:
    """The task's problems as this model's ids."""
    return Prompts(m.model, m.tokenizer, m.config.system or task.system, m.config.max_tokens)


def sampling_options(config: RunConfig) -> SamplingOptions:
    """How training samples are drawn."""
    return SamplingOptions(
        config.temperature, config.top_p, config.top_k, config.max_tokens, config.stop, config.keep_special_tokens
    )


def batch_options(config: RunConfig, algorithm: Any) -> BatchOptions:
    """How a batch is filled."""
    return BatchOptions(
        prompts=config.prompts, group_size=config.group_size, max_refills=config.max_refills, refill=config.refill,
        seed=config.seed, correct_at=config.correct_at, baseline="baseline" in algorithm.needs, dtype=dtype_of(config),
    )  # fmt: skip


def dtype_of(config: RunConfig) -> torch.dtype:
    """Of what is recorded about samples."""
    return torch.float64 if config.dtype == "float64" else torch.float32
