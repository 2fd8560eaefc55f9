"""Figures of one minibatch: they add up where the terms lie and are read once, when it is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kenpo.ranks import Ranks
from kenpo.types import Loss, Rollouts

Sums = dict[str, list[float]]


@dataclass
class Report:
    """What one batch's updates did. ``sums`` name -> [sum, count]; ``extremes`` name -> maximum."""

    rollouts: Rollouts
    state: Any
    sums: Sums = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    trained: int = 0
    foreign: int = 0  # of the trained tokens, those that this step did not sample
    lr: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a summed figure."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count


class Figures:
    """Sums with counts, and maxima, of one rank's share."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    def note(self, loss: Loss) -> None:
        """Add what one part of the minibatch gave."""
        self._add("loss", loss.loss.detach().double(), loss.loss.new_zeros((), dtype=torch.float64))
        for name, (total, count) in loss.sums.items():
            self._add(name, total.double(), count.double())
        for name, value in loss.extremes.items():
            old = self._extremes.get(name)
            value = value.double()
            self._extremes[name] = value if old is None else torch.maximum(old, value)

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a figure that is known on the host."""
        self._add(name, torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64))

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        old = self._sums.get(name)
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def read(self, ranks: Ranks) -> tuple[Sums, dict[str, float]]:
        """Everything over all ranks, as plain numbers: one wait for the device, one exchange."""
        flat = [x for pair in self._sums.values() for x in pair] + list(self._extremes.values())
        numbers = _numbers(flat)
        sums = {n: [numbers[2 * i], numbers[2 * i + 1]] for i, n in enumerate(self._sums)}
        extremes = dict(zip(self._extremes, numbers[2 * len(sums) :], strict=True))
        total: Sums = {}
        most: dict[str, float] = {}
        for part in ranks.gather({"sums": sums, "extremes": extremes}):
            for name, (x, n) in part["sums"].items():
                entry = total.setdefault(name, [0.0, 0.0])
                entry[0] += x
                entry[1] += n
            for name, value in part["extremes"].items():
                most[name] = max(most.get(name, -math.inf), value)
        return total, {name: value for name, value in most.items() if value > -math.inf}


def _numbers(values: list[Tensor]) -> list[float]:
    if not values:
        return []
    device = next((v.device for v in values if v.device.type != "cpu"), values[0].device)
    return torch.stack([v.to(device, non_blocking=True) for v in values]).tolist()
