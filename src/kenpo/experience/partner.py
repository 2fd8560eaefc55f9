"""Two policies side by side that exchange groups (GRAFT): each learns from what the other solved and it did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kenpo.batches import concatenate
from kenpo.errors import RunError
from kenpo.experience.exchange import exchanged
from kenpo.experience.source import Collected, Priorities, Score, Source, State, Usable
from kenpo.ops import masked
from kenpo.types import Rollouts

Train = Callable[[Rollouts, int], Mapping[str, Any]]
"""Updates the partner on its batch of a step; its figures, ``updates`` among them."""


class Exchange(Source):
    """`own` and `peer` sample the same problems; groups go over by `exchanged`; the partner learns at once, by `train`.
    `at` tells its engine how many updates its weights have had.

    A received group keeps an id of its own, so that its advantages are those of the group it comes from, and holds the
    source's mean log-prob per token in ``logp_source`` (NaN in a policy's own rows). A response without a verdict
    counts as wrong. The partner's figures begin with ``partner/``. State: that of both sources, and that
    number.
    """

    def __init__(
        self, own: Source, peer: Source, samples: int, correct_at: float, train: Train, at: Callable[[int], None]
    ) -> None:
        self.own, self.peer, self.samples, self.correct_at = own, peer, samples, correct_at
        self.train, self.at = train, at
        self.headline, self.heldout = own.headline, own.heldout

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        state = state or {}
        version = int(state.get("version", 0))
        self.at(version)
        a, b = self.own.next(step, state.get("own")), self.peer.next(step, state.get("peer"))
        mine, theirs = a.rollouts, b.rollouts
        if _problems(mine) != _problems(theirs):
            raise RunError("partner: the two policies met different problems, so their groups can't be exchanged")
        to_own, to_peer = exchanged(self.samples, self._correct(mine), self._correct(theirs))
        learnt = self.train(received(theirs, mine, to_peer), step)
        figures = {
            **a.figures, "received": {"sum": len(to_own), "count": len(_problems(mine))},
            "partner/received": {"sum": len(to_peer), "count": len(_problems(mine))},
            "partner/generated": b.generated, **_named(b.figures), **_named(learnt),
        }  # fmt: skip
        records = [*a.records, *({**r, "policy": "partner"} for r in b.records)]
        after = {"own": a.state, "peer": b.state, "version": version + learnt["updates"]}
        return Collected(received(mine, theirs, to_own), records, figures, after, a.generated, a.seconds)

    def measure(self, score: Score) -> dict[str, Any]:
        """Held-out figures of both."""
        return {**self.own.measure(score), **_named(self.peer.measure(score))}

    def _correct(self, rollouts: Rollouts) -> list[int]:
        """Correct responses of each group."""
        right = rollouts.rewards >= self.correct_at  # NaN is not
        return torch.bincount(rollouts.group[right], minlength=int(rollouts.group.max()) + 1).tolist()


def received(own: Rollouts, other: Rollouts, groups: list[int]) -> Rollouts:
    """`own` rows, then those of the other policy's `groups`, which get numbers of their own behind them."""
    rows = torch.isin(other.group, torch.tensor(groups, dtype=torch.int64))
    come = other[rows]
    come = come.replace(group=come.group + int(own.group.max()) + 1, logp_source=said(come))
    return concatenate([own.replace(logp_source=torch.full_like(own.rewards, math.nan)), come])


def said(rollouts: Rollouts) -> Tensor:
    """[B] the sampler's mean log-prob per token of what it sampled, in nats; 0 for an empty response."""
    assert rollouts.logp_sampler is not None
    return masked.row_mean(masked.select(rollouts.logp_sampler, rollouts.mask), rollouts.mask)


def _problems(rollouts: Rollouts) -> list[int]:
    """The problem of each group, in order."""
    assert rollouts.prompt_id is not None
    first = dict(zip(rollouts.group.tolist()[::-1], rollouts.prompt_id.tolist()[::-1], strict=True))
    return [first[g] for g in sorted(first)]


def _named(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"partner/{n}": v for n, v in figures.items()}
