"""Advantages from a reward of several named parts, each judged by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kenpo.errors import MissingFieldError, NonFiniteError, unknown_name
from kenpo.ops import groups
from kenpo.stages.base import Advantage
from kenpo.stages.context import Context


@dataclass(frozen=True)
class PartsZScore(Advantage):
    """``Σ_k w_k · (R_k − mean) / (std + eps)``: each part z-scored within the group, then summed by weight.

    So a part with a small spread counts as much as one with a large one, which the z-score of the sum does not give.
    ``parts``: names in ``rollouts.reward_parts`` (empty: all of them); ``weights``: one number each, in that order
    (empty: 1 each). A rollout whose part is NaN takes no share in that part and gets 0 for it. A part that is uniform
    in a group adds exactly 0. The outcome itself is not read, so shaping and a selection by outcomes are refused beside
    it. Raises `MissingFieldError` without parts, `UnknownNameError` for a name that no rollout has.
    Source: the per-axis group normalisation of GPRL, arXiv:2605.18721, whose weights sum to 1; here any numbers do.
    """

    parts: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    eps: float = 1e-4
    ddof: int = 1

    reads_parts = True

    def check(self) -> None:
        self.refuse(self.eps >= 0, f"eps must not be negative, got {self.eps}")
        self.refuse(self.ddof in (0, 1), f"ddof must be 0 or 1, got {self.ddof}")
        self.refuse(all(isinstance(n, str) and n for n in self.parts), f"parts are names, got {self.parts}")
        self.refuse(len(set(self.parts)) == len(self.parts), f"parts names one twice: {self.parts}")
        numbers = all(isinstance(w, int | float) and not isinstance(w, bool) and abs(w) <= 1e300 for w in self.weights)
        self.refuse(numbers, f"weights are finite numbers, got {self.weights}")
        paired = not self.weights or len(self.weights) == len(self.parts)
        self.refuse(paired, f"weights go with parts, one each: {len(self.parts)} parts, {len(self.weights)} weights")

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        given = ctx.reward_parts
        if not given:
            raise MissingFieldError(
                "parts_z_score needs reward_parts: named components of the reward, as a verifier that returns a dict "
                "gives them (kenpo train: --verifier file.py:function)"
            )
        total = rewards.new_zeros(rewards.shape)
        names = self.parts or tuple(sorted(given))
        for name, weight in zip(names, self.weights or [1.0] * len(names), strict=True):
            if name not in given:
                raise unknown_name("reward part", name, given)
            part = given[name].to(rewards.dtype)
            if bool(part[ctx.selected].isinf().any()):
                raise NonFiniteError(f"reward_parts.{name} holds an infinity; mend the reward function")
            valid = ctx.selected & ~part.isnan()
            total = total + weight * groups.zscore(part, ctx.group, valid, eps=self.eps, ddof=self.ddof)
        return ctx.per_token(total), state
