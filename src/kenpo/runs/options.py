"""Options of a run as such: its folder, what it writes and measures, how its process behaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kenpo.errors import InputError
from kenpo.options import Limits, Options, Paths


def home(path: str) -> str:
    """`~` is the user's folder; a run's folder is told as it was given."""
    return str(Path(path).expanduser())


@dataclass(frozen=True)
class RunOptions(Options):
    """The run's folder and its records."""

    LIMITS: ClassVar[Limits] = {"eval_every": 0, "checkpoint_every": 0, "keep": 0, "log_samples": 0}
    PATHS: ClassVar[Paths] = {"out": home, "series": home}

    eval_every: int | None = None
    """Steps between two measurements of held-out accuracy (recipe 4, else 20); 0: only before and after."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints (recipe 4, else 20); 0: only at the end."""
    keep: int = 2
    """Checkpoints kept; 0: all."""
    keep_best: str | None = None
    """Keep one more: the best by a held-out figure, such as eval/accuracy (highest; of a loss the lowest)."""
    record_batches: bool | None = None
    """Record each step's rollouts under batches/; default: yes up to 65,536 tokens per step."""
    log_samples: int = 256
    """Completions written to samples.jsonl per step."""
    loggers: tuple[str, ...] = ()
    """tensorboard, wandb, trackio."""
    out: str | None = None
    """Run folder; it must not exist. Default: runs/ALGORITHM-TASK-N."""
    recipe: str | None = None
    """Named options: on-policy, several-updates, long-answers, sparse-reward, ppo, vapo, luffy, grin, sft_mixture,
    repo, oc_grpo, graft, sdpo, opsd, opd, gkd, minillm, teacher_mixed, spo, riskpo, gapo, mad_rl, ttrl; options beside
    it win."""
    series: str | None = None
    """Run folder of a series: RUN, RUN-2, RUN-3 ...; an unfinished last one is resumed. --out goes before it."""
    resume: bool = False
    """Go on with the run in --out, or in the folder given right here (--resume RUN), from its last checkpoint."""
    accept_changes: bool = False
    """Resume although rows, a verifier, an algorithm or a model changed since; changes.jsonl names them."""
    dry_run: bool = False
    """Print the plan and stop."""
    quiet: bool = False
    """No progress, errors only."""

    def check(self) -> None:
        """A recipe has been taken apart."""
        if self.recipe is not None:
            raise InputError(
                "recipe: an option of the command line; in Python: TrainConfig(**kenpo.presets.RECIPES[name])"
            )
