"""Outcomes judged by a frozen critic: its value at the last token, freed of what length alone says, and a threshold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kenpo.ops.masked import mean, select


class Calibration(NamedTuple):
    """What `calibrate` fits: inner edges of the length bins (tokens), one offset per bin, and the threshold."""

    edges: Tensor
    offsets: Tensor
    tau: float


def length_offset(lengths: Tensor, edges: Tensor, offsets: Tensor) -> Tensor:
    """[B] the offset of each length's bin; a bin is the number of edges below the length."""
    return offsets[(edges.unsqueeze(0) < lengths.unsqueeze(-1)).sum(-1)]


def calibrate(values: Tensor, lengths: Tensor, correct: Tensor, bins: int = 10) -> Calibration:
    """Length offsets and the threshold of a frozen critic, from labelled rollouts.

    `values` [N] at the last token, `lengths` [N] in tokens, `correct` [N] bool. Edges are the quantiles j/bins of all
    lengths; ``b_d = ½ Σ over the two classes of (mean v in class and bin − mean v in class)``, a term without rows 0;
    tau is the (1 − share of correct)-quantile of v − b. Quantiles interpolate linearly.
    Source: RFPO, arXiv:2609.37119; how the two classes and empty bins enter b is our reading.
    """
    x = values.double()
    levels = torch.arange(1, bins, dtype=torch.float64, device=x.device) / bins
    edges = torch.quantile(lengths.double(), levels)
    index = (edges.unsqueeze(0) < lengths.double().unsqueeze(-1)).sum(-1)
    offsets = x.new_zeros(bins)
    for label in (correct, ~correct):
        for d in range(bins):
            cell = label & (index == d)
            offsets[d] += select(mean(x, cell) - mean(x, label), cell.any()) / 2
    share = mean(correct.double(), torch.ones_like(correct))
    tau = torch.quantile(x - length_offset(lengths.double(), edges, offsets), 1 - share)
    return Calibration(edges, offsets, float(tau))
