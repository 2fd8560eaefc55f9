"""Replay: groups of earlier batches, as they were sampled, beside fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.batches import concatenate
from kenpo.errors import InputError
from kenpo.experience.options import CollectOptions
from kenpo.experience.source import Collected, Priorities, Score, Source, State, Usable
from kenpo.fields import REPLAYED
from kenpo.types import Rollouts

LIMIT = 256


@dataclass(frozen=True)
class ReplayOptions:
    """``groups`` replayed in each batch, out of at most ``limit`` that are held.

    ``order``: the ``oldest`` first, the ``newest``, or by ``priority``: the group whose rewards differ most (their
    standard deviation), of equal ones the older. ``max_staleness``: a held group with a token of more updates ago is
    forgotten; None: none is.
    """

    groups: int
    limit: int = LIMIT
    order: str = "oldest"
    max_staleness: int | None = None


class Held(NamedTuple):
    """One group as it was collected, and the step that collected it."""

    step: int
    rollouts: Rollouts


class Replay(Source):
    """`source` with groups of earlier batches beside each of its own; ``version`` tells the updates done so far.

    A group is replayed whole and once: it leaves what is held when it is drawn. What was recorded when it was sampled
    stays: the sampler's log-probs, the versions, the rewards; ``origin`` is 1. Groups of the present batch join what is
    held after the draw; beyond the limit the oldest is forgotten. Early batches hold fewer groups, until enough are
    held. Records and the count of generated tokens are the source's own. State: the source's own and all held groups.
    """

    def __init__(self, source: Source, options: ReplayOptions, version: Callable[[], int]) -> None:
        self.source, self.options, self.version = source, options, version
        self.headline, self.heldout, self.notes = source.headline, source.heldout, source.notes

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The source's batch of `step` with replayed groups behind it."""
        state = state or {"source": None, "held": []}
        made = self.source.next(step, state["source"], priorities, usable)
        held = [Held(entry["step"], _unpacked(entry)) for entry in state["held"]]
        young = [h for h in held if not self._expired(h.rollouts)]
        places = self._drawn(young)
        fresh = _marked(made.rollouts, None)
        drawn = [_marked(young[i].rollouts, REPLAYED) for i in places]
        first = int(fresh.group.max()) + 1
        batch = concatenate([fresh, *(d.replace(group=d.group * 0 + first + n) for n, d in enumerate(drawn))])
        kept = [h for i, h in enumerate(young) if i not in places]
        kept += [Held(step, fresh[fresh.group == g]) for g in torch.unique(fresh.group)]
        kept = kept[max(0, len(kept) - self.options.limit) :]
        figures = {
            **made.figures,
            "replayed": {"sum": len(batch) - len(fresh), "count": len(batch)},
            "replay/held": len(kept),
            "replay/expired": len(held) - len(young),
        }
        after = {"source": made.state, "held": [{"step": h.step, **_packed(h.rollouts)} for h in kept]}
        return Collected(batch, made.records, figures, after, made.generated, made.seconds)

    def measure(self, score: Score) -> dict[str, Any]:
        """The source's own held-out figures."""
        return self.source.measure(score)

    def _expired(self, group: Rollouts) -> bool:
        most, made = self.options.max_staleness, group.policy_version
        if most is None or made is None or not bool(group.mask.any()):
            return False
        return self.version() - int(made[group.mask].min()) > most

    def _drawn(self, held: list[Held]) -> list[int]:
        """Places of the groups to replay, in the order of the draw. Held groups stand oldest first."""
        places = list(range(len(held)))
        if self.options.order == "newest":
            places.reverse()
        elif self.options.order == "priority":
            spread = [_spread(h.rollouts.rewards) for h in held]
            places.sort(key=lambda i: -spread[i])
        return places[: self.options.groups]


def replayed_groups(share: float, prompts: int) -> int:
    """How many of a batch's groups are replayed. InputError for a share that leaves none, or none fresh."""
    number = round(share * prompts)
    if not 0 < number < prompts:
        raise InputError(
            f"--replay {share:g}: of --prompts {prompts} groups that is {number}; at least one has to be replayed and "
            "one fresh"
        )
    return number


def check_replay(config: CollectOptions, source: str, minibatches: int, tracker: str | None) -> None:
    """InputError for options of a replay that would have no effect, or the wrong one. ``tracker``: the algorithm, if it
    tracks every prompt's outcomes."""
    if config.replay is None:
        for option, given in (("--replay-limit", config.replay_limit), ("--replay-order", config.replay_order)):
            if given is not None:
                raise InputError(f"{option} {given}: nothing is replayed without --replay SHARE; leave it out")
        return
    if source != "on_policy":
        raise InputError(f"--replay: samples of the policy are replayed, not {source}; leave it out")
    if minibatches > (fresh := fresh_prompts(config)):
        raise InputError(
            f"--minibatches {minibatches}: the first batch holds {fresh} fresh groups and nothing to replay; "
            "give at most as many minibatches, or a smaller --replay"
        )
    if tracker is not None:
        raise InputError(
            f"--replay: {tracker!r} tracks every prompt's outcomes, and would count a replayed one twice; leave it out"
        )


def with_replay(
    source: Source, config: CollectOptions, max_staleness: int | None, version: Callable[[], int]
) -> Source:
    """`source` with groups of earlier batches beside its own; itself where nothing is replayed."""
    if config.replay is None:
        return source
    groups = replayed_groups(config.replay, config.prompts or 0)
    limit, order = config.replay_limit or LIMIT, config.replay_order or "oldest"
    return Replay(source, ReplayOptions(groups, limit, order, max_staleness), version)


def fresh_prompts(config: CollectOptions) -> int:
    """Groups of a batch that are sampled."""
    prompts = config.prompts or 0
    return prompts - (0 if config.replay is None else replayed_groups(config.replay, prompts))


def _spread(rewards: Tensor) -> float:
    judged = rewards[rewards.isfinite()]
    return float(judged.double().std(correction=0)) if len(judged) else 0.0


def _marked(rows: Rollouts, origin: int | None) -> Rollouts:
    """`rows` with ``origin``: theirs, else 0; or `origin` where the policy itself had sampled."""
    mine = torch.zeros_like(rows.group) if rows.origin is None else rows.origin
    return rows.replace(origin=mine if origin is None else torch.where(mine == 0, origin, mine))


def _packed(rows: Rollouts) -> dict[str, Any]:
    """As a source's state holds it."""
    return {"fields": rows.tensors(), "parts": dict(rows.reward_parts), "contexts": dict(rows.contexts)}


def _unpacked(entry: dict[str, Any]) -> Rollouts:
    return Rollouts(**entry["fields"], reward_parts=entry["parts"], contexts=entry["contexts"])
