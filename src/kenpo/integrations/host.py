"""What plug-ins for other trainers share: shuffling by group, identities of prompts, figures as sums and counts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kenpo.types import Loss

#: Figures as they travel: name -> (sum, count), and name -> maximum.
Plain = tuple[dict[str, tuple[float, float]], dict[str, float]]


def shuffled_by_group(group: Tensor) -> Tensor:
    """[B] an order of rows in which the groups are shuffled and the rows of each stay together, in their order."""
    names = group.unique()
    order = [(group == names[i]).nonzero().squeeze(1) for i in torch.randperm(len(names)).tolist()]
    return torch.cat(order) if order else group.new_zeros(0)


def prompt_ids(tokens: Tensor, mask: Tensor) -> Tensor:
    """[B] an identity of each row's prompt: a digest of the tokens (−1: none) before its first trainable one.

    >>> a = prompt_ids(torch.tensor([[-1, 5, 6, 7], [5, 6, 8, 9]]), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool())
    >>> bool(a[0] == a[1])
    True
    """
    made = []
    for ids, trained in zip(tokens, mask, strict=True):
        end = int(trained.int().argmax()) if bool(trained.any()) else len(ids)
        real = ids[:end][ids[:end] >= 0]
        digest = hashlib.blake2b(real.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
        made.append(int.from_bytes(digest, "big") >> 1)
    return torch.tensor(made, dtype=torch.int64)


class Figures:
    """Sums, counts and maxima of the losses seen since the last log line."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.extremes: dict[str, Tensor] = {}

    def note(self, loss: Loss) -> None:
        """Add one microbatch's share."""
        for name, (s, n) in loss.sums.items():
            old = self.sums.get(name)
            self.sums[name] = (s, n) if old is None else (old[0] + s, old[1] + n)
        for name, v in loss.extremes.items():
            self.extremes[name] = torch.maximum(self.extremes[name], v) if name in self.extremes else v

    def plain(self) -> Plain:
        """The same as numbers, to be sent to other ranks."""
        sums = {name: (float(s), float(n)) for name, (s, n) in self.sums.items()}
        return sums, {name: float(v) for name, v in self.extremes.items()}


def merged(ranks: Sequence[Plain]) -> dict[str, float]:
    """Averages and maxima over all ranks; those over nothing are left out.

    >>> merged([({"kept": (3.0, 4.0)}, {"ratio_max": 2.0}), ({"kept": (0.0, 2.0)}, {"ratio_max": 1.0})])
    {'kept': 0.5, 'ratio_max': 2.0}
    """
    sums: dict[str, list[float]] = {}
    extremes: dict[str, float] = {}
    for some, largest in ranks:
        for name, (s, n) in some.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += s
            entry[1] += n
        for name, value in largest.items():
            extremes[name] = max(value, extremes.get(name, -math.inf))
    averages = {name: s / n for name, (s, n) in sums.items() if n}
    return averages | {name: value for name, value in extremes.items() if value > -math.inf}
