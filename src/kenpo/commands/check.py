"""`kenpo check`: what is installed here, and whether a training step runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kenpo.commands.arguments import parse
from kenpo.terminal import one_line

_DESCRIPTION = """What is installed here, the device that a run would take, and one trial step on it.

examples:
  kenpo check
  kenpo check --json
"""
PACKAGES = ("kenpo", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "math-verify",
            "reasoning-gym", "peft", "tensorboard", "wandb", "trackio")  # fmt: skip


@dataclass(frozen=True)
class CheckOptions:
    """Options of ``kenpo check``."""

    device: str | None = None
    """cpu, cuda or cuda:N; default: the one that `kenpo train` would take."""
    json: bool = False
    """One JSON object: ok, versions, device, problems."""


def check(argv: list[str]) -> int:
    """The command ``kenpo check``: exit status 0 where a step runs, else 2."""
    options = parse(CheckOptions, argv, prog="kenpo check", description=_DESCRIPTION)
    found = inspect(options.device)
    if options.json:
        print(json.dumps(found))
    else:
        for name, number in found["versions"].items():
            print(f"{name:<14} {number}")
        print(f"{'device':<14} {found['device']}")
        for problem in found["problems"]:
            print(f"problem: {one_line(problem)}")
        print("a training step runs here" if found["ok"] else "a training step does not run here")
    return 0 if found["ok"] else 2


def inspect(device: str | None) -> dict[str, Any]:
    """What ``kenpo check --json`` prints. Packages that are not installed have no version."""
    from kenpo.models.machine import best_device

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    device = device or best_device()
    problems = trial(device)
    return {"ok": not problems, "versions": versions, "device": device, "problems": problems}


def trial(device: str) -> list[str]:
    """What stands in the way of one step of the bundled model; empty if it ran."""
    import kenpo
    from kenpo.trainer.config import TrainConfig

    with tempfile.TemporaryDirectory() as folder:
        try:
            kenpo.train(
                TrainConfig(
                    steps=1,
                    prompts=2,
                    group_size=2,
                    max_tokens=8,
                    eval_problems=2,
                    device=device,
                    quiet=True,
                    out=str(Path(folder) / "run"),
                )
            )
        except Exception as error:  # whatever a broken installation raises is what is asked for
            return [f"{type(error).__name__}: {error}"]
    return []
