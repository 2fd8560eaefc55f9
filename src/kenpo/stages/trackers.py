"""Advantages against what is remembered of a prompt from earlier batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops import groups, tracker
from kenpo.stages.base import Advantage, Scope
from kenpo.stages.context import Context


@dataclass(frozen=True)
class BetaTracker(Advantage):
    """``A = r − v``, v the prompt's tracked rate of success so far; then ``(A − mean)/(std + 1e-8)``, ddof 1.

    One response per prompt is enough: every row is judged against its own prompt's past and normalised over the rollout
    batch (0 if all A are equal). Every row reads v before any row is folded in: reading after would leak the reward
    into its own baseline. Then, row by row, ``α ← ρα + r, β ← ρβ + 1 − r``; a prompt that occurs twice is folded twice,
    in row order, so the state (not the advantages) depends on that order where the two rows' ρ or r differ.

    ``forgetting="drift"``: ρ = 2^(−D/half_life) held in [rho_min, rho_max], D = ``drift`` [B], the mean |log π_then −
    log π_now| over the prompt's previous response (`kenpo.ops.tracker.log_prob_drift`; NaN: a first visit, ρ =
    rho_max). "constant": ρ = rho_min. ``form="ema"`` tracks (v, N), ``v += (r − v)/(ρN + 1)``, for rewards outside [0,
    1], which "beta" refuses. A prompt without a record starts at (.5, .5); `start` makes a state from offline samples.
    ``capacity``: the prompts kept, those not seen for longest go first.

    State: ``prompt`` [N] int64 and ``pair`` [N,2] float64, (α, β) or (v, N), in order of last visit.
    Source: SPO, arXiv:2509.13232, and its released code.
    """

    forgetting: Literal["drift", "constant"] = "drift"
    half_life: float = 0.06
    rho_min: float = 0.875
    rho_max: float = 0.96
    form: Literal["beta", "ema"] = "beta"
    capacity: int = 1_000_000

    _scope = Scope.STREAM

    def check(self) -> None:
        ordered = 0 < self.rho_min <= self.rho_max < 1
        self.refuse(ordered, f"0 < rho_min ≤ rho_max < 1, got {self.rho_min} and {self.rho_max}")
        self.refuse(self.half_life > 0, f"half_life must be positive, got {self.half_life}")
        self.refuse(self.capacity > 0, f"capacity must be positive, got {self.capacity}")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_id"} | ({"drift"} if self.forgetting == "drift" else set()))

    def start(self, offline: Mapping[int, tuple[int, int]], smoothed: bool = True) -> dict[str, Tensor]:
        """A state from offline samples: prompt_id -> (successes, samples)."""
        pairs = {}
        for prompt, (successes, samples) in offline.items():
            if not 0 <= successes <= samples:
                raise InputError(f"beta_tracker: prompt {prompt} has {successes} successes in {samples} samples")
            a, b = tracker.beta_start(successes, samples, self.rho_min, smoothed)
            pairs[prompt] = (a, b) if self.form == "beta" else (a / (a + b), a + b)
        return _packed(pairs, self.capacity)

    def priorities(self, state: Any) -> Mapping[int, float] | None:
        """Sampling weight √(v(1 − v)) + .05 of each known prompt; None before there is a record."""
        if state is None:
            return None
        values = {p: min(max(self._value(pair), 0.0), 1.0) for p, pair in _unpacked(state).items()}
        return {p: (v * (1 - v)) ** 0.5 + 0.05 for p, v in values.items()}

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any]:
        prompts = ctx.read("prompt_id").tolist()
        known = {} if state is None else _unpacked(state)
        fresh = (0.5, 0.5) if self.form == "beta" else (0.5, 1.0)
        baseline = rewards.new_tensor([self._value(known.get(p, fresh)) for p in prompts])
        drift = ctx.read("drift").tolist() if self.forgetting == "drift" else None
        for row in ctx.selected.nonzero().flatten().tolist():
            pair, r = known.pop(prompts[row], fresh), float(rewards[row])
            rho = self.rho_min if drift is None else self._rho(drift[row])
            if self.form == "beta" and not 0 <= r <= 1:
                raise InputError(f"beta_tracker: rollout {row} has reward {r}, outside [0, 1]; set advantage.form=ema")
            fold = tracker.beta_fold if self.form == "beta" else tracker.ema_fold
            known[prompts[row]] = fold(pair, r, rho)  # at the end: visited last
        raw = rewards - baseline
        a = groups.zscore(raw, torch.zeros_like(ctx.group), ctx.selected, eps=1e-8, ddof=1)
        return ctx.per_token(a), _packed(known, self.capacity)

    def _value(self, pair: tuple[float, float]) -> float:
        return pair[0] if self.form == "ema" else pair[0] / (pair[0] + pair[1])

    def _rho(self, drift: float) -> float:
        return tracker.forgetting(drift, half_life=self.half_life, low=self.rho_min, high=self.rho_max)


def _packed(known: Mapping[int, tuple[float, float]], capacity: int) -> dict[str, Tensor]:
    kept = list(known.items())[-capacity:]
    pairs = torch.tensor([pair for _, pair in kept], dtype=torch.float64).reshape(-1, 2)
    return {"prompt": torch.tensor([p for p, _ in kept], dtype=torch.int64), "pair": pairs}


def _unpacked(state: Mapping[str, Tensor]) -> dict[int, tuple[float, float]]:
    return {p: (a, b) for p, (a, b) in zip(state["prompt"].tolist(), state["pair"].tolist(), strict=True)}
