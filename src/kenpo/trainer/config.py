"""The configuration of a run: options as they are given (`TrainConfig`) and the run that they come to (`RunConfig`).

The options stand in groups where their subjects live. Those whose default is None have no fixed default: `resolve`
fills them, from the recipe of the bundled model when both the model and the task are the bundled ones, else from
`USUAL`. The resolved configuration is what a run records in ``config.json``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from kenpo.engines.options import PLACE, EngineOptions
from kenpo.errors import InputError, UnknownNameError, unknown_name
from kenpo.experience.feeding import GIVEN, SOURCE_OF, check_source
from kenpo.experience.options import BUNDLED_TASK, ExperienceOptions
from kenpo.jsonfile import read_json
from kenpo.kinds import check_kinds
from kenpo.learner.options import AlgorithmOptions, CompanyOptions, UpdateOptions
from kenpo.models.machine import best_device, free_threads
from kenpo.models.options import BUNDLED_MODEL, ModelOptions
from kenpo.options import check_groups, flag, whole_paths
from kenpo.runs.continuing import ANEW
from kenpo.runs.options import RunOptions
from kenpo.trainer.defaults import PAIRED, RECIPE, RECIPE_SETTINGS, SUPERVISED, USUAL

# Fields that say how this process behaves, not what the run is: they are neither recorded nor compared on resume.
PROCESS_FIELDS = frozenset({"recipe", "out", "series", "resume", "accept_changes", "dry_run", "quiet"})
TAKEN_ON_RESUME = ("accept_changes", "dry_run", "quiet")  # from the command line that resumes
# Recorded, yet free to differ when a run is resumed: they change no number (a sampling room at most last bits).
_FREE = {"loggers", "keep", "max_refills", "sampling_tokens", "verifier_workers", "verifier_memory"}
FREE_ON_RESUME = ANEW | PLACE | _FREE

_SEVERAL = ("schedule", "stages", "stop", "task", "eval_file", "verifier", "loggers", "betas", "lora_targets")


@dataclass(frozen=True)
class TrainConfig(
    RunOptions, UpdateOptions, EngineOptions, ExperienceOptions, CompanyOptions, AlgorithmOptions, ModelOptions,
):  # fmt: skip
    """Everything that defines a training run, as it is given. None: filled by `resolve`, printed, and recorded."""

    def __post_init__(self) -> None:
        for name in _SEVERAL:  # lists from JSON or from Python callers
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name, value in vars(self).items():
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        check_kinds(self, flag)
        check_groups(self)

    def check(self) -> None:
        """InputError for options of two groups that exclude each other."""
        if self.keep_best is not None and not self.eval_problems:
            raise InputError(f"--keep-best {self.keep_best}: nothing is measured with --eval-problems 0")

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed; UnknownNameError for a field that does not exist."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def whole(self) -> Self:
        """A copy whose paths open from any working folder. Names of tasks, models and algorithms stay as they are."""
        return self.but(**whole_paths(self))


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """A resolved configuration: what a run is made from. Nothing is left to be filled that every run needs."""

    source: str
    settings: dict[str, Any]
    steps: int
    prompts: int
    group_size: int
    max_tokens: int
    lr: float
    warmup: int
    betas: tuple[float, float]
    eval_every: int
    checkpoint_every: int
    record_batches: bool
    dtype: Literal["float32", "bfloat16", "float64"]
    device: str
    threads: int

    @property
    def updates(self) -> int:
        """Optimizer steps that a rollout batch is consumed by."""
        return self.minibatches * self.epochs


FIELDS = tuple(f.name for f in dataclasses.fields(TrainConfig))


def resolve(config: TrainConfig) -> RunConfig:
    """The configuration with every None filled in: from the recipe for the bundled model on its task, else `USUAL`."""
    source = config.source or SOURCE_OF.get(config.algorithm, "on_policy")
    check_source(config, source, BUNDLED_TASK)
    values = {**vars(config), "source": source}
    given = source in GIVEN
    bundled = config.model == BUNDLED_MODEL and config.task == BUNDLED_TASK
    recipe = bundled and not given
    special = {"demonstrations": SUPERVISED, "pairs": PAIRED if bundled else {}}
    _fill(values, **{**USUAL, **(RECIPE if recipe else special.get(source, {}))} | _group_size(source))
    if config.algorithm == "repo":
        values["rephrase"] = True
    if given and config.task == BUNDLED_TASK and config.algorithm != "reward_model":
        _fill(values, eval_task=BUNDLED_TASK)
    values["settings"] = resolve_settings(config.settings, recipe and config.algorithm == "grpo")
    _fill(values, device=best_device(), threads=free_threads())
    on_gpu = values["device"].startswith("cuda")
    _fill(values, dtype="bfloat16" if on_gpu else "float32")
    if config.deterministic == "off" and not on_gpu:
        raise InputError("--deterministic off: kernels on a CPU are deterministic as they are; leave it out")
    if config.lora_rank:
        _fill(values, lora_alpha=2.0 * config.lora_rank)
    _fill(values, record_batches=values["prompts"] * values["group_size"] * values["max_tokens"] <= 65536)
    run = RunConfig(**values)
    if run.minibatches > run.prompts:
        raise InputError(
            f"--minibatches {run.minibatches} exceeds --prompts {run.prompts}: a minibatch holds whole groups"
        )
    return run


def _fill(values: dict[str, Any], **usual: Any) -> None:
    """Take the usual value where there is none."""
    values.update({name: value for name, value in usual.items() if values[name] is None})


def _group_size(source: str) -> dict[str, int]:
    """What a source's responses per prompt come to, where it brings them along."""
    return {"group_size": GIVEN[source]} if source in GIVEN else {}


def resolve_settings(given: Mapping[str, Any] | None, recipe: bool) -> dict[str, Any]:
    """The settings in force. The recipe's stand unless one of `given` names the same slot, whole or in part."""
    given = dict(given or {})
    if not recipe:
        return given
    mine = {k: v for k, v in RECIPE_SETTINGS.items() if k not in given and not any(_covers(k, g) for g in given)}
    return {**mine, **given}


def _covers(recipe_key: str, given_key: str) -> bool:
    return given_key.startswith(recipe_key + ".") or recipe_key.startswith(given_key + ".")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """What ``config.json`` holds: every field but those that say how a process behaves."""
    return {n: list(v) if isinstance(v := getattr(config, n), tuple) else v for n in FIELDS if n not in PROCESS_FIELDS}


def from_dict(values: Mapping[str, Any], where: str = "") -> TrainConfig:
    """A configuration from its dict. UnknownNameError for a key that is not a field, InputError for a wrong value."""
    _refuse_unknown(values, where)
    try:
        return TrainConfig(**values)
    except TypeError as error:
        raise InputError(f"{where + ': ' if where else ''}a value has the wrong kind ({error})") from None


def _refuse_unknown(values: Mapping[str, Any], where: str = "") -> None:
    for key in values:
        if key not in FIELDS:
            raise UnknownNameError(f"{where + ': ' if where else ''}{unknown_name('option', str(key), FIELDS)}")


def load(path: str | os.PathLike[str]) -> TrainConfig:
    """A configuration from a JSON file. InputError if it can't be read."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected one JSON object of options")
    return from_dict(values, str(path))


def differences(recorded: TrainConfig, given: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """{name: (recorded, given)} where a run to be resumed differs from what was recorded. None counts as not given."""
    resolved = resolve(given)
    different = {}
    for name in FIELDS:
        if name in PROCESS_FIELDS | FREE_ON_RESUME or getattr(given, name) is None:
            continue
        was, now = getattr(recorded, name), getattr(resolved, name)
        if now != was:
            different[name] = (was, now)
    return different
