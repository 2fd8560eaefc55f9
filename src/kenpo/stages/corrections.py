"""Corrections of the sampler mismatch: weights made from ρ = π_old/μ, what the trainer says over what the engine said.

They compose with any algorithm whose ratio is anchored at π_old. With a ratio anchored at the sampler the mismatch
would be counted twice, so that pair is refused. ``anchor`` is the numerator: "prox" puts an averaged policy in π_old's
place, and the ratio must then be anchored there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kenpo.ops import divergences, masked, ratios, trust
from kenpo.stages.base import Scope, Weight
from kenpo.stages.context import Context

Numerator = Literal["old", "prox"]


def _rho(ctx: Context, anchor: str, level: str) -> Tensor:
    """[B,T] ρ per token, or the product over the response on each of its tokens; log ρ saturates at ±20."""
    x = ctx.log_correction(anchor)
    return (ratios.sequence_log_sum(x, ctx.mask).expand_as(x) if level == "sequence" else x).exp()


@dataclass(frozen=True)
class TruncatedIS(Weight):
    """``min(ρ, cap)``, ρ = π_old/μ: truncated importance sampling, one-sided (a small ρ is kept as it is).

    ``cap`` is absolute (None: open). ``level``: "token", or "sequence" for the product of ρ over the response on each
    of its tokens. ``normalise``: divide by the minibatch's mean weight (over tokens, or over responses), so that the
    mean is 1; this couples the minibatch. Source: TIS, fengyao.notion.site/off-policy-rl; normalisation as in verl and
    slime.
    """

    cap: float | None = 2.0
    level: Literal["token", "sequence"] = "token"
    normalise: bool = False
    anchor: Numerator = "old"

    _needs = frozenset({"logp_sampler"})
    is_correction = True
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.cap is None or self.cap > 0, f"cap must be positive, got {self.cap}")

    @property
    def span(self) -> Scope:
        return Scope.BATCH if self.normalise else Scope.SEQUENCE if self.level == "sequence" else Scope.TOKEN

    def __call__(self, ctx: Context) -> Tensor:
        w = _rho(ctx, self.anchor, self.level)
        w = w if self.cap is None else w.clamp(max=self.cap)
        return trust.normalised(w, ctx.mask, by_row=self.level == "sequence") if self.normalise else w


@dataclass(frozen=True)
class MaskedIS(Weight):
    """ρ where it lies in [floor, cap], else 0: masked importance sampling. Bounds are absolute and inclusive.

    ``level``: "token"; "sequence" for the product over the response, in the test and as the weight; "geometric": a
    response is kept if the geometric mean of its ρ lies in the band, and its tokens then carry their own raw ρ.
    ``veto``: a response with any token ρ below it is dropped whole (slime: 1e-4). ``normalise``: divide by the
    minibatch's mean weight, masked tokens counted as 0.
    Source: TRL, slime and verl; IcePop (arXiv:2510.18855) is the token level with [0.5, 5].
    """

    floor: float = 0.5
    cap: float = 2.0
    level: Literal["token", "sequence", "geometric"] = "token"
    veto: float | None = None
    normalise: bool = False
    anchor: Numerator = "old"

    _needs = frozenset({"logp_sampler"})
    is_correction = True
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(0 <= self.floor < self.cap, f"needs 0 ≤ floor < cap, got floor {self.floor}, cap {self.cap}")
        self.refuse(self.veto is None or self.veto > 0, f"veto must be positive, got {self.veto}")

    @property
    def span(self) -> Scope:
        if self.normalise:
            return Scope.BATCH
        return Scope.TOKEN if self.level == "token" and self.veto is None else Scope.SEQUENCE

    def __call__(self, ctx: Context) -> Tensor:
        w = tested = _rho(ctx, self.anchor, self.level)
        x = ctx.log_correction(self.anchor)
        if self.level == "geometric":
            tested = ratios.sequence_log_mean(x, ctx.mask).exp()
        keep = (tested >= self.floor) & (tested <= self.cap)
        if self.veto is not None:
            keep = keep & ~(ctx.mask & (x.exp() < self.veto)).any(-1, keepdim=True)
        w = masked.select(w, keep & ctx.mask)
        return trust.normalised(w, ctx.mask, by_row=self.level == "sequence") if self.normalise else w


@dataclass(frozen=True)
class BinaryKLMask(Weight):
    """1 where the event "this token" is alike under π_old and μ: B(p‖q) ≤ threshold and B(q‖p) ≤ threshold, else 0.

    ``B(p‖q) = p log(p/q) + (1−p) log((1−p)/(1−q))``, p = π_old, q = μ. ``keep_rho``: the kept tokens carry ρ instead of
    1. The accepted band of ρ narrows as the token gets likelier. Source: KPop, arXiv:2606.15079; the report prints a
    0/1 indicator and gives no threshold, 0.05 is ours (AReaL's 2.0 masks almost nothing).
    """

    threshold: float = 0.05
    keep_rho: bool = False
    anchor: Numerator = "old"

    _needs = frozenset({"logp_sampler"})
    is_correction = True
    anchor_sensitive = True

    def check(self) -> None:
        self.refuse(self.threshold >= 0, f"threshold must not be negative, got {self.threshold}")

    @property
    def carries_correction(self) -> bool:
        return self.keep_rho

    def __call__(self, ctx: Context) -> Tensor:
        p, q = ctx.read(f"logp_{self.anchor}").detach(), ctx.read("logp_sampler")
        near = torch.maximum(*divergences.binary_kls(p, q)) <= self.threshold
        return masked.select(_rho(ctx, self.anchor, "token"), near) if self.keep_rho else near
