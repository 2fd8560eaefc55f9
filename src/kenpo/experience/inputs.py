"""The data of a run, opened before a model is loaded: task and verifier, demonstrations, pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.addition import DROPPED_CARRY
from kenpo.experience.demonstrations import AdditionTexts, FileTexts, Texts
from kenpo.experience.feeding import GIVEN
from kenpo.experience.files import FileTask
from kenpo.experience.options import BUNDLED_TASK, ExperienceOptions
from kenpo.experience.pairing import open_pairs
from kenpo.experience.pairs import PairStream
from kenpo.experience.prompts import Prompts
from kenpo.experience.shards import Spec
from kenpo.experience.tasks import Task, load_task
from kenpo.experience.verdict import Verifier
from kenpo.experience.verifiers import load_verifier


@dataclass
class Inputs:
    """What can be checked without loading a model. ``texts`` are demonstrations, ``pairs`` preferences; a run on them
    has a task, and a verifier, only if it measures accuracy on one."""

    algorithm: Any
    task: Task | None = None
    verifier: Verifier | None = None
    texts: Texts | None = None
    pairs: PairStream | None = None


@contextlib.contextmanager
def open_data(
    config: ExperienceOptions, source: str, algorithm: Any, show: Callable[[str], None] | None = None
) -> Iterator[Inputs]:
    """What the source reads, and what measures accuracy. InputError for data that can't be used.

    `show` is handed what the verifier prints; its processes end on the way out.
    """
    inputs, spec = Inputs(algorithm), config.task if source not in GIVEN else config.eval_task
    if source == "demonstrations":
        inputs.texts = open_texts(config)
    elif source == "pairs":
        inputs.pairs = open_pairs(config, algorithm)
    if spec is None or (source in GIVEN and not config.eval_problems):
        yield inputs
        return
    inputs.task = open_task(config, spec, source in GIVEN)
    with load_verifier(
        config.verifier or inputs.task.verifier, task=inputs.task, time_limit=config.time_limit,
        workers=config.verifier_workers, memory=config.verifier_memory, sandbox=config.sandbox, show=show,
        answer_column=config.answer_column,
    ) as inputs.verifier:  # fmt: skip
        yield inputs


def open_task(config: ExperienceOptions, spec: Spec, given: bool) -> Task:
    """The task of an ordinary run, or the one on which a run whose source brings responses measures accuracy."""
    if given:
        return load_task(spec, seed=config.seed, heldout=config.eval_problems, system=config.system)
    task = load_task(
        spec, seed=config.seed, prompt_column=config.prompt_column, answer_column=config.answer_column,
        heldout=config.eval_problems, eval_file=config.eval_file, system=config.system,
    )  # fmt: skip
    task.train(0)
    return task


def open_texts(config: ExperienceOptions) -> Texts:
    """The demonstrations of a run."""
    if config.task == BUNDLED_TASK:
        return AdditionTexts(config.seed, DROPPED_CARRY if config.dropped_carry is None else config.dropped_carry)
    return FileTexts(
        config.task, config.prompt_column, config.response_column, config.seed, config.eval_problems, config.eval_file
    )


def leave_out_long(config: ExperienceOptions, task: Task, prompts: Prompts) -> None:
    """Leave rows out that the model's context has no room for, if that is asked for. InputError for an endless task."""
    if config.long_prompts == "refuse":
        return
    if not isinstance(task, FileTask):
        raise InputError(f"--long-prompts skip: the problems of {task.name} are made one by one; it is for data files")
    task.leave_out(prompts.too_long, f"leaves no room for a response in the context of {prompts.context}")


def reach(config: ExperienceOptions, steps: int, algorithm: Any, task: Task) -> int:
    """How many problems are looked at before anything is sampled: a file's rows as far as the run may get, else one
    batch of an endless task."""
    assert config.prompts is not None
    if task.size is None:
        return config.prompts
    rounds = 1 + (config.max_refills if algorithm.selection else 0)
    return max(config.prompts, min(task.size, steps * config.prompts * rounds))
