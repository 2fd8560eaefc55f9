"""How old rollouts are, in optimizer updates, and which are too old to learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.types import Rollouts


def ages(rollouts: Rollouts, updates: int) -> Tensor | None:
    """[B,T] `updates` done so far less those of the weights that sampled each token; 0 off the mask and where nobody
    said which weights (version −1). None where the batch holds no versions."""
    if rollouts.policy_version is None:
        return None
    known = rollouts.mask & (rollouts.policy_version >= 0)
    return torch.where(known, updates - rollouts.policy_version.long(), 0)


def oldest(rollouts: Rollouts, updates: int) -> Tensor | None:
    """[B] the age of each row's oldest trainable token."""
    found = ages(rollouts, updates)
    return None if found is None or not found.shape[1] else found.amax(-1)


def fresh_enough(rollouts: Rollouts, updates: int, most: int | None) -> tuple[Rollouts, int]:
    """(rows whose oldest token is at most ``most`` updates old, how many were left out); all of them for None.

    They leave before anything is compared: a group's statistics are those of the rows that stay.
    """
    age = oldest(rollouts, updates)
    if age is None or most is None or bool((age <= most).all()):
        return rollouts, 0
    kept = age <= most
    return rollouts[kept], int((~kept).sum())


def age_figures(rollouts: Rollouts, updates: int) -> dict[str, tuple[float, float]]:
    """``staleness``: the mean age of the trainable tokens; empty where the batch holds no versions."""
    found = ages(rollouts, updates)
    if found is None:
        return {}
    return {"staleness": (float(found[rollouts.mask].sum()), float(rollouts.mask.sum()))}


def all_fresh(rollouts: Rollouts, version: int) -> bool:
    """Whether every trainable token was sampled by the weights called `version` (or nobody said by which)."""
    found = ages(rollouts, version)
    return found is None or not bool(found.any())


def gap_of_the_fresh(rollouts: Rollouts, version: int) -> float | None:
    """The largest |log π_old − log μ| over the tokens that these very weights sampled: how far sampler and trainer
    disagree on the same weights. None without such a token or without both log-probs."""
    found = ages(rollouts, version)
    if found is None or rollouts.logp_old is None or rollouts.logp_sampler is None:
        return None
    fresh = rollouts.mask & (found == 0)
    gap = (rollouts.logp_old - rollouts.logp_sampler).abs()[fresh]
    return float(gap.max()) if gap.numel() else None
