"""What a run stands on besides its configuration, as digests: rows, the user's own files, the model, the tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kenpo.experience.pairs import Pair
from kenpo.experience.problem import Problem
from kenpo.experience.weighted import read_weight
from kenpo.learner.critic import named
from kenpo.models.loading import BUNDLED
from kenpo.options import listed
from kenpo.runs.identity import Identity, digest_of, file_digest, folder_digest, rows_digest
from kenpo.trainer.config import RunConfig
from kenpo.trainer.sources import Inputs


def identity(config: RunConfig, inputs: Inputs) -> Identity:
    """Digests of what can be read without loading a model: rows, the user's own files, the model's folder."""
    found: Identity = {}
    task, texts = inputs.task, inputs.texts
    if texts is not None and texts.rows:
        found["demonstrations"] = rows_digest(listed(config.task), [[t.prompt, t.response] for t in texts.rows])
        held = [[t.prompt, t.response] for t in texts.heldout]
        found["held-out demonstrations"] = rows_digest(listed(config.eval_file or config.task), held)
    if inputs.pairs is not None:
        held = [_pair(p) for p in inputs.pairs.heldout]
        found["pairs"] = rows_digest(listed(config.task), [_pair(p) for p in inputs.pairs.rows])
        found["held-out pairs"] = rows_digest(listed(config.eval_file or config.task), held)
    if task is not None and task.ids is not None:
        found["rows of the task"] = rows_digest(listed(config.task), [_row(task.problem(n)) for n in task.ids])
    if task is not None and config.eval_problems and (task.ids is not None or config.eval_file):
        held = [_row(p) for p in task.heldout(config.eval_problems)]
        found["held-out rows"] = rows_digest(listed(config.eval_file or config.task), held)
    for package in _packages(config):
        found[f"version of {package}"] = {"digest": _version(package), "of": package}
    for name, file in _own_files(config):
        if file.is_file():
            found[f"{name} {file.name}"] = {"digest": file_digest(file), "of": str(file)}
    if config.corpus is not None:
        found["corpus"] = {"digest": file_digest(Path(config.corpus)), "of": config.corpus}
    if config.partner is not None and (second := _model_folder(config.partner)) is not None:
        found["partner"] = {"digest": folder_digest(second), "of": config.partner}
    if config.expert is not None:
        found["expert traces"] = {"digest": file_digest(Path(config.expert)), "of": config.expert}
    folder = _model_folder(config.model)
    if folder is not None:
        found["model"] = {"digest": folder_digest(folder), "of": config.model}
    for spec in _verifiers(config):
        if spec.startswith("model:") and (judge := Path(spec.removeprefix("model:"))).is_dir():
            found[f"reward model {judge.name}"] = {"digest": folder_digest(judge), "of": str(judge)}
    if config.teacher not in (None, "base") and (taught := _model_folder(config.teacher or "")) is not None:
        found["teacher"] = {"digest": folder_digest(taught), "of": config.teacher}
    if named(config.critic) and (critic := _model_folder(config.critic or "")) is not None:
        found["critic"] = {"digest": folder_digest(critic), "of": config.critic}
    return found


def _row(problem: Problem) -> list[Any]:
    return [problem.prompt, problem.answer, dict(problem.extra)]


def _pair(pair: Pair) -> list[Any]:
    return [pair.prompt, pair.chosen, pair.rejected, pair.margin]


def _packages(config: RunConfig) -> Iterable[str]:
    if listed(config.task).startswith("reasoning_gym"):
        yield "reasoning-gym"
    if "math_verify" in _verifiers(config):
        yield "math-verify"


def _verifiers(config: RunConfig) -> list[str]:
    named = config.verifier or ()
    return [read_weight(item)[0] for item in ([named] if isinstance(named, str) else named)]


def _own_files(config: RunConfig) -> Iterable[tuple[str, Path]]:
    for spec in _verifiers(config):
        file = Path(spec.rpartition(":")[0])
        if file.suffix == ".py":
            yield "verifier", file
    where = config.algorithm.rpartition(":")[0]
    if where.endswith(".py"):
        yield "algorithm", Path(where)
    elif where in sys.modules:  # it was imported to be resolved
        yield "algorithm", Path(getattr(sys.modules[where], "__file__", None) or "")


def _model_folder(model: str) -> Path | None:
    """The folder of a model: its own, or where the hub's files were put; None where there is none yet."""
    if model == "bundled":
        return BUNDLED
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def identity_of_tokenizer(tokenizer: Any) -> Identity:
    """Digests of the vocabulary and of the chat template in use."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    template = getattr(tokenizer, "chat_template", None)
    return {
        "vocabulary": {"digest": digest_of([vocabulary.encode()]), "of": "the tokenizer"},
        "chat template": {"digest": digest_of([json.dumps(template).encode()]), "of": "the tokenizer"},
    }
