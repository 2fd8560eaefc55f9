"""Which rollouts take part. Dynamic sampling refills what a selection drops; the refilling is the training loop's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.ops import groups
from kenpo.stages.base import Selection
from kenpo.stages.context import Context


@dataclass(frozen=True)
class DropUniformGroups(Selection):
    """Keep only groups whose raw outcomes differ: the others carry no group-relative signal.

    Tests the raw outcome, not shaped rewards or a standard deviation, and keeps or drops whole groups. A group of one
    is dropped. Source: DAPO, arXiv:2503.14476, section 3.2 ("dynamic sampling", without the refilling).
    """

    def __call__(self, ctx: Context) -> Tensor:
        return groups.group_varies(ctx.rewards, ctx.group, ctx.selected)
