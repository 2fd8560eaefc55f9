"""Options of the algorithm, of the models beside the policy, and of its updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kenpo.errors import InputError, unknown_name
from kenpo.models.options import model_path
from kenpo.options import Limits, Options, Paths, ScheduleSpec, Settings, Stages, code_path
from kenpo.schedules import Schedule, parse

COURSES = ("constant", "linear", "cosine")


def teacher_path(name: str) -> str:
    """A teacher's folder; base and hint are words for the policy itself."""
    return name if name in ("base", "hint") else model_path(name)


def critic_path(name: str) -> str:
    """A critic's folder; trunk and copy are words for the policy's own model."""
    return name if name in ("trunk", "copy") else model_path(name)


@dataclass(frozen=True)
class AlgorithmOptions(Options):
    """The algorithm, and what is changed in it."""

    PATHS: ClassVar[Paths] = {"algorithm": code_path}

    algorithm: str = "grpo"
    """A catalogued name (`kenpo list`) or your own as file.py:NAME."""
    settings: Settings = None
    """Change slots of the algorithm: --set surrogate.high=0.3 regularizers=[]."""
    stages: Stages = ()
    """Append stages by name: --with untruncated."""


@dataclass(frozen=True)
class CompanyOptions(Options):
    """Models beside the policy: a critic, a teacher, a partner."""

    LIMITS: ClassVar[Limits] = {"critic_lr": 0, "critic_warmup": 0}
    PATHS: ClassVar[Paths] = {"critic": critic_path, "teacher": teacher_path, "partner": model_path}

    critic: str | None = None
    """What predicts values: a scalar head on the policy's trunk (where they are read), on a copy of the policy as it
    begins (copy), or on this model, apart."""
    critic_lr: float | None = None
    """Learning rate of the critic: of its head on the trunk, of its whole model otherwise (10 times --lr)."""
    critic_warmup: int = 0
    """Rollout batches at first in which the critic learns alone; the policy's learning rate takes its course after."""
    teacher: str | None = None
    """Model whose log-probs or divergence a distilling algorithm reads (same vocabulary); base: the policy without its
    adapter; hint: the policy, shown a hint (a folder of one of these names is written ./base)."""
    hint_column: str | None = None
    """Column with what --teacher hint is shown (hint; sdpo: another right answer of the group)."""
    hint_template: str | None = None
    """Text that holds {prompt} and {hint} once (the task's own, else one in English)."""
    partner: str | None = None
    """Second policy, of the same vocabulary, that trains beside this one and exchanges groups with it (graft)."""


@dataclass(frozen=True)
class UpdateOptions(Options):
    """How many updates, of how much, by which optimizer."""

    LIMITS: ClassVar[Limits] = {
        "steps": 1, "minibatches": 1, "epochs": 1, "microbatch_tokens": 1, "lr": 0, "warmup": 0, "weight_decay": 0,
        "grad_clip": 0,
    }  # fmt: skip

    steps: int | None = None
    """Rollout batches to train on (recipe 12, else 200)."""
    minibatches: int = 1
    """Optimizer steps per pass over a rollout batch, each on its share of the groups."""
    epochs: int = 1
    """Passes over each rollout batch."""
    microbatch_tokens: int = 16384
    """Padded tokens that one forward and backward holds at once; changes memory and speed only."""
    optimizer: Literal[
        "adamw", "torchao_adamw_8bit", "torchao_adamw_4bit", "bnb_adamw_8bit", "bnb_paged_adamw", "bnb_paged_adamw_8bit"
    ] = "adamw"
    """adamw is torch's; the others need torchao or bitsandbytes and save memory."""
    lr: float | None = None
    """Learning rate (recipe 1e-4, else 1e-6)."""
    schedule: ScheduleSpec = "constant"
    """Course of the learning rate after the warm-up: constant, linear or cosine, which go towards 0; and numbers of the
    algorithm that move: ratio.p=1:0@200 goes from 1 to 0 over 200 steps and stays."""
    warmup: int | None = None
    """Steps of linear warm-up (recipe 10, else 0)."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    betas: tuple[float, float] | None = None
    """AdamW's (recipe 0.9 0.99, else 0.9 0.999)."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0: off."""
    prox_decay: float | None = None
    """Of the average of the weights that an algorithm with a proximal policy compares with (0.9)."""

    @property
    def course(self) -> str:
        """That of the learning rate."""
        return next((w for w in self._words() if w in COURSES), "constant")

    @property
    def moving(self) -> list[Schedule]:
        """The numbers of the algorithm that move along the run."""
        return [parse(w) for w in self._words() if w not in COURSES]

    def _words(self) -> tuple[str, ...]:
        return (self.schedule,) if isinstance(self.schedule, str) else self.schedule

    def check(self) -> None:
        """Averages forget, and a course is known."""
        for word in self._words():
            if "=" not in word and word not in COURSES:
                raise unknown_name("schedule", word, COURSES, "(or KEY=FROM:TO@STEPS, such as ratio.p=1:0@200)")
        if sum(word in COURSES for word in self._words()) > 1:
            raise InputError(f"--schedule {' '.join(self._words())}: the learning rate takes one course")
        _ = self.moving  # each can be read
        if self.prox_decay is not None and not 0 <= self.prox_decay < 1:
            raise InputError(f"--prox-decay: {self.prox_decay} is not in [0, 1)")
        if self.betas is not None and not (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)):
            raise InputError(f"--betas: two numbers in [0, 1) expected, got {self.betas}")
