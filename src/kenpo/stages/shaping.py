"""Changes to the outcome before the advantage is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kenpo.errors import InputError, MissingFieldError
from kenpo.ops import masked
from kenpo.stages.base import Shaping
from kenpo.stages.context import Context


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """Subtract a penalty that grows from 0 to 1 over the last `buffer` tokens before `limit`.

    ``0 if n ≤ limit − buffer; ((limit − buffer) − n)/buffer up to n = limit; −1 beyond``, n = trainable tokens.
    ``limit`` (L_max, tokens) None: inactive. ``buffer`` (L_c, tokens) must not exceed the limit. ``factor`` multiplies
    the penalty before ``floor`` bounds it; floor None: it grows on beyond the limit.
    Source: DAPO, arXiv:2503.14476, eq. 13; floored at −1 as printed (verl's reward manager has a factor and no floor).
    """

    limit: int | None = None
    buffer: int = 4096
    factor: float = 1.0
    floor: float | None = -1.0

    def check(self) -> None:
        self.refuse(self.buffer > 0, f"buffer must be positive, got {self.buffer}")
        self.refuse(0 < self.factor < math.inf, f"factor must be a positive number, got {self.factor}")
        self.refuse(self.floor is None or self.floor < 0, f"floor must be negative or null, got {self.floor}")
        self.refuse(
            self.limit is None or self.buffer <= self.limit,
            f"buffer {self.buffer} exceeds limit {self.limit}, so every response would be penalised; lower the buffer",
        )

    @property
    def off(self) -> str | None:
        return "limit is not set" if self.limit is None else None

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        if self.limit is None:
            return rewards
        over = (self.limit - self.buffer - ctx.lengths) / self.buffer * self.factor
        return rewards + over.clamp(self.floor, 0).to(rewards.dtype)


@dataclass(frozen=True)
class Calibration(Shaping):
    """``c − (q − c)²``: the outcome c in [0, 1], less the squared error of the stated confidence q in [0, 1].

    q is the reward part ``confidence``. The best q is the probability of being right, and the reward at the best q
    rises with it, so neither accuracy nor calibration costs the other. A response without a confidence in [0, 1] (NaN,
    or outside) earns ``invalid``; by default the least that any confidence could earn. ``format_weight`` adds that much
    of the part ``format`` (NaN: nothing). Raises `MissingFieldError` without the parts, `InputError` for an outcome
    outside [0, 1]. Source: RLCR, arXiv:2507.16806; what an invalid confidence earns is ours.
    """

    invalid: float = -1.0
    format_weight: float = 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        return ("confidence", "format") if self.format_weight else ("confidence",)

    def check(self) -> None:
        self.refuse(math.isfinite(self.invalid), f"invalid must be finite, got {self.invalid}")
        self.refuse(math.isfinite(self.format_weight), f"format_weight must be finite, got {self.format_weight}")

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        given = ctx.reward_parts
        for name in self.parts:
            if name not in given:
                raise MissingFieldError(
                    f"calibration needs the reward part {name!r}: a verifier that returns a dict with it (kenpo train: "
                    "--verifier file.py:function)"
                )
        outside = ctx.selected & ((rewards < 0) | (rewards > 1))
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise InputError(f"calibration: rollout {row} has reward {float(rewards[row]):g}, outside [0, 1]")
        q = given["confidence"].to(rewards.dtype)
        stated = (q >= 0) & (q <= 1)
        shaped = torch.where(stated, rewards - (q - rewards) ** 2, rewards.new_tensor(self.invalid))
        if self.format_weight:
            shaped = shaped + self.format_weight * given["format"].to(rewards.dtype).nan_to_num(0.0)
        return masked.select(shaped, ctx.selected)
