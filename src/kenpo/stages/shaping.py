"""Changes to the outcome before the advantage is taken."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.stages.base import Shaping
from kenpo.stages.context import Context


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """Subtract a penalty that grows from 0 to 1 over the last `buffer` tokens before `limit`.

    ``0 if n ≤ limit − buffer; ((limit − buffer) − n)/buffer up to n = limit; −1 beyond``, n = trainable tokens.
    ``limit`` (L_max, tokens) None: inactive. ``buffer`` (L_c, tokens) must not exceed the limit.
    Source: DAPO, arXiv:2503.14476, eq. 13; floored at −1 as printed (verl's reward manager has no floor).
    """

    limit: int | None = None
    buffer: int = 4096

    def check(self) -> None:
        self.refuse(self.buffer > 0, f"buffer must be positive, got {self.buffer}")
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
        over = (self.limit - self.buffer - ctx.lengths) / self.buffer
        return rewards + over.clamp(-1, 0).to(rewards.dtype)
