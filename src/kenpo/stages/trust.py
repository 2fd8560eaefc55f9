"""Weights that decide which tokens or responses to trust: detached masks on the policy's own drift or on the sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kenpo.stages.base import Scope, Weight
from kenpo.stages.context import Context


@dataclass(frozen=True)
class Untruncated(Weight):
    """0 on every token of a response that hit the length limit ("overlong filtering"), 1 elsewhere.

    Set the aggregate's ``over="kept"`` as well, so that the dropped tokens also leave the denominator.
    Source: DAPO, arXiv:2503.14476, section 3.4.
    """

    _needs = frozenset({"truncated"})
    _scope = Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        return ~ctx.read("truncated").unsqueeze(-1) & ctx.mask
