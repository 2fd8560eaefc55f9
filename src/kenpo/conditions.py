"""Which parts of an algorithm can act under given conditions, and how many updates a batch can bear.

An algorithm's parts act on distances between policies. With one update of a fresh batch, sampled by the trainer's own
weights in its own arithmetic, all these distances are 0: ratios are 1, clips and corrections do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from kenpo.algorithm import Algorithm
from kenpo.stages.base import Stage, snake

_UPDATE = "several updates of a batch (--minibatches or --epochs above 1)"
_LAG = "batches that older weights sampled"
OFF = "another number"  # what a part needs that a number of its own switches off
_ENGINE = "an engine whose log-probs differ from the trainer's"


class Part(NamedTuple):
    """One part of an algorithm. ``needed`` says what would make it act, and is empty where it acts."""

    part: str
    acts: bool
    why: str
    needed: str = ""


def acts(
    a: Algorithm, updates: int = 1, stale: bool = False, foreign: bool = False, truncated: bool = True
) -> list[Part]:
    """Of every part by its settings key, whether it can act, why, and what would make it act.

    `updates`: optimizer steps that consume one rollout batch. `stale`: older weights may have sampled it. `foreign`:
    the sampler's log-probs differ from the trainer's for the same weights, as those of an outside engine do.
    `truncated`: a response may hit the length limit. A part that can act need not do so in each batch.

    >>> import kenpo
    >>> [p.part for p in acts(kenpo.get("grpo")) if not p.acts]
    ['ratio', 'surrogate']
    >>> [p.part for p in acts(kenpo.get("grpo"), updates=4) if not p.acts]
    []
    """
    found = []
    for slot in a.SLOTS:
        value = getattr(a, slot)
        for stage in value if isinstance(value, tuple) else (value,):
            if stage is not None:
                key = f"{slot}.{snake(stage)}" if isinstance(value, tuple) else slot
                found.append(_judged(a, key, stage, updates, stale, foreign, truncated))
    return found


def _judged(a: Algorithm, key: str, stage: Stage, updates: int, stale: bool, foreign: bool, truncated: bool) -> Part:
    if stage.off is not None:
        return Part(key, False, stage.off, OFF)
    if "truncated" in stage.needs and not truncated:
        return Part(key, False, "no response hits the length limit", "responses that do")
    distance = a.ratio.distance if stage is a.surrogate and a.ratio is not None else stage.distance
    if stage is a.surrogate and not a.surrogate.bounds:
        distance = None
    if distance is None:
        return Part(key, True, "it needs no distance between policies")
    here, there = distance
    causes = [(_UPDATE, updates > 1)] if here == "policy" else []
    if there == "sampler":
        causes += [(_LAG, stale), (_ENGINE, foreign)]
    if "prox" in distance:
        causes += [(_UPDATE, updates > 1), (_LAG, stale)]
    if "guided" in distance:
        return Part(key, True, "the prompt that sampled is another one")
    present = [cause for cause, there_is in causes if there_is]
    words = f"{_NAMES[here]} and {_NAMES[there]}"
    if present:
        return Part(key, True, f"{words} differ: {present[0]}")
    what = "every ratio is 1" if stage in (a.ratio, a.surrogate) else "every log-ratio between them is 0"
    return Part(key, False, f"{words} are the same policy: {what}", " or ".join(dict.fromkeys(c for c, _ in causes)))


def uncorrected(a: Algorithm) -> str | None:
    """Why samples of older weights give a biased gradient, and what would fit; None: the algorithm allows for them.

    True of an algorithm that averages over the policy's own samples and reads no distance to what sampled: its ratio
    compares with π_old, scored when the batch is used, which is not the policy that sampled it.
    """
    if a.surrogate.any_samples or not a.advantage.judges or any("sampler" in _distance(s) for s in a.stages):
        return None
    what = "has no importance ratio"
    if a.ratio is not None:
        what = "compares with π_old, which is scored when a batch is used"
    return (
        f"{a.name} {what}, and no stage reads how far that is from the weights that sampled. What would fit: a ratio "
        "to the sampler (m2po, dppo, trm, minpro), or a correction in front of this one (--with truncated_is)"
    )


def _distance(stage: Stage) -> tuple[str, ...]:
    return stage.distance or ()


_NAMES = {"policy": "π_θ", "old": "π_old", "sampler": "the sampler", "prox": "π_prox", "guided": "the guided policy"}


def biased(a: Algorithm, updates: int) -> str | None:
    """Why the updates of a batch beyond the first follow a biased gradient, or None: they don't.

    True of an algorithm without importance ratio whose objective is an average over the policy's own samples: after one
    step the batch is no longer such a sample, and no trust region holds the policy near it.
    """
    weighed = a.ratio is not None or any(s.is_ratio for s in a.weights)
    if updates <= 1 or weighed or a.surrogate.any_samples or not a.advantage.judges:
        return None
    gated = any(s.distance is not None and s.distance[0] == "policy" for s in a.weights)
    loose = "" if gated else " and nothing holds the others near the policy that sampled"
    return (
        f"{a.name} has no importance ratio: of {updates} updates of a batch only the first follows the policy "
        f"gradient{loose}; use one update per batch"
    )
