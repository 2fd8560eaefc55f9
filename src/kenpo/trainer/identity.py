"""What a run stands on besides its configuration, as digests: rows, the user's own files, the model, the tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kenpo.experience.contents import held_of, rows_of
from kenpo.experience.weighted import read_weight
from kenpo.learner.critic import named
from kenpo.options import listed
from kenpo.runs.identity import Identity, file_entry, model_entry, package_entry, rows_digest
from kenpo.trainer.config import RunConfig
from kenpo.trainer.sources import Inputs


def identity(config: RunConfig, inputs: Inputs) -> Identity:
    """Digests of what can be read without loading a model: rows, the user's own files, the model's folder."""
    given = inputs.task, inputs.texts, inputs.pairs
    held = held_of(*given, config.eval_problems, bool(config.eval_file))
    found: Identity = {n: rows_digest(listed(config.task), rows) for n, rows in rows_of(*given).items()}
    found |= {n: rows_digest(listed(config.eval_file or config.task), rows) for n, rows in held.items()}
    found |= {f"version of {package}": package_entry(package) for package in _packages(config)}
    found |= {f"{n} {file.name}": file_entry(file) for n, file in _own_files(config) if file.is_file()}
    found |= {n: file_entry(f) for n, f in (("corpus", config.corpus), ("expert traces", config.expert)) if f}
    models = {
        "model": config.model, "partner": config.partner, "critic": config.critic if named(config.critic) else None,
        "teacher": None if config.teacher in ("base", "hint") else config.teacher,
    }  # fmt: skip
    judges = [v.removeprefix("model:") for v in _verifiers(config) if v.startswith("model:")]
    models |= {f"reward model {Path(judge).name}": judge for judge in judges}
    return found | {n: entry for n, name in models.items() if name and (entry := model_entry(name))}


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
