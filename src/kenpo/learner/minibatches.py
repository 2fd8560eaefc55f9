"""How a rollout batch is cut into the minibatches of one pass over it."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from kenpo.seeds import stable_seed
from kenpo.types import Rollouts


def minibatches(rollouts: Rollouts, number: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Rows of each minibatch: whole groups, shuffled by a seed of their own where there is more than one.

    A partner's groups stand in minibatches of their own, about as large, after all the policy's own.
    """
    group, source = rollouts.group, rollouts.logp_source
    theirs = torch.zeros_like(group, dtype=torch.bool) if source is None else source.isfinite()
    own, peers = torch.unique(group[~theirs]), torch.unique(group[theirs])
    made = _parts(group, own, number, stable_seed(seed, step, epoch, 0x6D62))
    if len(peers):
        number = math.ceil(len(peers) * number / max(1, len(own)))
        made += _parts(group, peers, number, stable_seed(seed, step, epoch, 0x6D63))
    return made


def _parts(group: Tensor, names: Tensor, number: int, seed: int) -> list[list[int]]:
    """The rows of the groups in `names`, cut into `number` parts of whole groups; one part keeps their order."""
    if number > 1:
        names = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
    number = min(number, max(1, len(names)))
    cuts = [len(names) * i // number for i in range(number + 1)]
    return [torch.isin(group, names[a:b]).nonzero().squeeze(1).tolist() for a, b in itertools.pairwise(cuts)]
