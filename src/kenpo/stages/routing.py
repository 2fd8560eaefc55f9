"""The drift of a mixture of experts' routers: a factor on ratios, or a weight on tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.errors import NonFiniteError
from kenpo.ops import masked, ratios
from kenpo.stages.base import Stage, Weight
from kenpo.stages.context import Context


@dataclass(frozen=True)
class RouterShift(Stage):
    """γ_t in (0, 1], detached: how little the routers moved at the experts that were active under the old ones.

    ``layers`` pools the change of log-scores: "geometric" (mean over layers, the default), "product" (sum), or the same
    two on a per-layer mean of exp(−|change|) ("fork_…", a public fork's). γ ≥ ``floor`` (0.8 is ours). ``placement``:
    behind the token clip, or before it, where γ·r is what is clipped. Source: RSPO, arXiv:2510.23027.
    """

    floor: float = 0.8
    layers: Literal["geometric", "product", "fork_geometric", "fork_product"] = "geometric"
    placement: Literal["post_clip", "pre_clip"] = "post_clip"

    _needs = frozenset({"router_logp", "router_logp_old"})

    def check(self) -> None:
        self.refuse(0 <= self.floor <= 1, f"floor must be in [0, 1], got {self.floor}")

    def log_factor(self, ctx: Context) -> Tensor:
        """[B,T] log γ, at least log(floor) and at least −20; a constant. `NonFiniteError` for a NaN score."""
        with torch.no_grad():
            change = ctx.read("router_logp") - ctx.read("router_logp_old")
            shift = ratios.saturate(ratios.router_log_shift(change, self.layers))
            if where := masked.first_bad(shift, ctx.mask):
                raise NonFiniteError(
                    f"router_logp: NaN at the trained position {list(where)} (rollout, token); "
                    "record the routers' log-scores there under both policies, or mask that token"
                )
            least = torch.as_tensor(self.floor, dtype=torch.float64).log().item()
            return shift.clamp(min=least)


@dataclass(frozen=True)
class RouterStability(Weight):
    """γ_t of a `RouterShift` as a weight on each token's objective, behind the clip (its ``placement`` has no say).

    Source: RSPO, arXiv:2510.23027, the token form.
    """

    shift: RouterShift = RouterShift()

    _needs = frozenset({"logp"})

    @property
    def distance(self) -> tuple[str, str]:
        return "policy", "old"

    def __call__(self, ctx: Context) -> Tensor:
        return self.shift.log_factor(ctx).exp()
