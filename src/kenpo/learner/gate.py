"""The parity gate: the sampler's log-probs beside the trainer's, on the same weights, before a batch is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenpo.errors import RunError
from kenpo.learner.learner import Learner
from kenpo.learner.staleness import ages
from kenpo.learner.suspects import Suspects
from kenpo.models.scorer import LOGP
from kenpo.types import Rollouts

ROWS = 64  # rows that are scored
BAD_ROWS = 4  # rows that causes are tried on
QUARTERS = 4
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-4}
ROUGH = 0.23  # bfloat16: three times the worst gap of a clean run (docs/guides/vllm.md)


@dataclass(frozen=True)
class Gap:
    """|log π − log μ| over tokens that the present weights sampled: quantiles, the worst and where, by quarters."""

    tokens: int
    median: float
    high: float  # 0.99 quantile
    worst: float
    row: int
    position: int  # of the response, from 0
    quarters: tuple[float, ...]

    def __str__(self) -> str:
        parts = " ".join(f"{q:.1e}" for q in self.quarters)
        return (
            f"{self.tokens} tokens: median {self.median:.1e}, 99 % {self.high:.1e}, worst {self.worst:.1e} (row "
            f"{self.row}, token {self.position}), worst by quarter of the response {parts}"
        )


def measure(rollouts: Rollouts, logp: Tensor, fresh: Tensor) -> Gap | None:
    """The gap between `logp` [B,T] and the sampler's over the tokens of `fresh` [B,T]; None without such a token."""
    assert rollouts.logp_sampler is not None
    gap = torch.where(fresh, (logp.double().cpu() - rollouts.logp_sampler.double()).abs(), -1.0)
    found = gap[fresh]
    if not found.numel():
        return None
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    place = fresh.cumsum(1) - 1
    quarter = place * QUARTERS // fresh.sum(1, keepdim=True).clamp(min=1)
    worst = [_most(gap, fresh & (quarter == q)) for q in range(QUARTERS)]
    return Gap(
        found.numel(), float(found.quantile(0.5)), float(found.quantile(0.99)), float(found.max()), row,
        int(place[row, column]), tuple(worst),
    )  # fmt: skip


def _most(gap: Tensor, where: Tensor) -> float:
    return float(gap[where].max()) if bool(where.any()) else 0.0


class Gate:
    """Looks at the first two batches and every N-th one; raises before a batch above the bound is trained on.

    ``bound`` None: 1e-4 in float32 and float64, `ROUGH` in bfloat16. It keeps one copy of the trained weights, those
    before the last update, to tell which weights a sampler was left with.
    """

    def __init__(self, every: int, bound: float | None, top_p: float = 1.0) -> None:
        self.every, self.bound = every, bound
        self.looks = 0
        self.suspects = Suspects(top_p)

    def check(self, learner: Learner, rollouts: Rollouts, step: int, version: int) -> dict[str, float]:
        """``gate_gap``: the largest gap, on batches that it looks at. RunError above the bound, with the cause that
        fits."""
        due = self.looks < 2 or step % self.every == 0
        found = self._look(learner, rollouts, step, version) if due else {}
        self.suspects.remember(learner.scorer.model)
        return found

    def _look(self, learner: Learner, rollouts: Rollouts, step: int, version: int) -> dict[str, float]:
        if rollouts.logp_sampler is None:
            return {}
        self.looks += 1
        spread = torch.linspace(0, len(rollouts) - 1, min(ROWS, len(rollouts))).long().unique().tolist()
        some = rollouts[spread]
        said = some.logp_sampler
        assert said is not None
        age = ages(some, version)
        fresh = some.mask & said.isfinite()
        fresh = fresh if age is None else fresh & (age == 0)
        logp = learner.terms(some, LOGP).logp
        assert logp is not None
        gap = measure(some, logp, fresh)
        if gap is None:
            return {}
        scorer = learner.scorer
        dtype = next(scorer.model.parameters()).dtype
        bound = BOUNDS.get(dtype, ROUGH) if self.bound is None else self.bound
        if not gap.worst <= bound:
            by_row = torch.where(fresh, (logp.double().cpu() - said.double()).abs(), 0.0).amax(1)
            bad = [r for r in by_row.argsort(descending=True).tolist() if float(by_row[r]) > bound][:BAD_ROWS]
            cause = self.suspects.cause(scorer.model, some[bad], scorer.temperature, bound)
            raise RunError(
                f"step {step}: the sampler's log-probs differ from the trainer's under the same weights by more than "
                f"{bound:g}. {gap}. {cause} The batch was not trained on. (--gate-bound X allows more, --gate-every 0 "
                "looks away)"
            )
        return {"gate_gap": gap.worst}
