"""Which rollouts take part. Dynamic sampling refills what a selection drops; the refilling is the training loop's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import MissingFieldError, unknown_name
from kenpo.ops import groups
from kenpo.stages.base import Scope, Selection
from kenpo.stages.context import Context


@dataclass(frozen=True)
class DropTruncated(Selection):
    """Keep only responses that ended before the length limit: a truncated one enters no statistic and no count.

    So its reward moves neither the group's mean nor its spread; `Untruncated`, a weight, leaves it in both. A group of
    which one response is left teaches nothing. Source: ours; the papers that filter overlong responses mask the loss.
    """

    _needs = frozenset({"truncated"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        return ~ctx.read("truncated") & ctx.selected


@dataclass(frozen=True)
class DropUniformGroups(Selection):
    """Keep only groups whose raw outcomes differ: the others carry no group-relative signal.

    Tests the raw outcome, not shaped rewards or a standard deviation, and keeps or drops whole groups. A group of one
    is dropped. ``by="parts"``: keep groups in which one of the reward's named ``parts`` differs, whatever their sum; it
    goes with an advantage of the same parts (empty: all), and "outcome" with all others.
    Source: DAPO, arXiv:2503.14476, section 3.2 ("dynamic sampling", without the refilling).
    """

    by: Literal["outcome", "parts"] = "outcome"
    parts: tuple[str, ...] = ()

    def check(self) -> None:
        self.refuse(self.by == "parts" or not self.parts, "parts are tested with by='parts' only")

    def __call__(self, ctx: Context) -> Tensor:
        if self.by == "outcome":
            return groups.group_varies(ctx.rewards, ctx.group, ctx.selected)
        if not ctx.reward_parts:
            raise MissingFieldError(
                "drop_uniform_groups by parts needs reward_parts: named components of the reward, as a verifier that "
                "returns a dict gives them (kenpo train: --verifier file.py:function)"
            )
        keep = torch.zeros_like(ctx.selected)
        for name in self.parts or ctx.reward_parts:
            if name not in ctx.reward_parts:
                raise unknown_name("reward part", name, ctx.reward_parts)
            part = ctx.reward_parts[name]
            varies = groups.group_varies(part, ctx.group, ctx.selected & ~part.isnan())
            keep = keep | (groups.group_sum(varies.to(part.dtype), ctx.group, varies) > 0)
        return keep & ctx.selected
