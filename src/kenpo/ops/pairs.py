"""Pairs of responses of one group, told apart by their rewards, and losses of the difference of two scores.

Axes: B responses, P pairs. A pair is (better, worse): same group, both valid, reward of the first strictly higher.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kenpo.ops.groups import group_count, group_sum
from kenpo.ops.masked import divide


def decided_pairs(outcome: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(better [P], worse [P]) rows of every decided pair of every group, whatever order the rows stand in.

    Ties are no pairs; neither are rows outside `valid`.

    >>> everyone = torch.ones(4, dtype=torch.bool)
    >>> decided_pairs(torch.tensor([0.0, 1.0, 1.0, 5.0]), torch.tensor([7, 7, 7, 3]), everyone)
    (tensor([1, 2]), tensor([0, 0]))
    """
    together = (group[:, None] == group) & valid[:, None] & valid
    better, worse = (together & (outcome[:, None] > outcome)).nonzero(as_tuple=True)
    return better, worse


def mean_over_pairs(values: Tensor, better: Tensor, group: Tensor) -> Tensor:
    """[P] -> [B]: each pair's value over the number of pairs of its group, on the row of its better response.

    The sum over a group's rows is the mean over its pairs.
    """
    rows = values.new_zeros(len(group)).index_add(0, better, values)
    won = torch.zeros_like(rows.detach()).index_add(0, better, torch.ones_like(values.detach()))
    everyone = torch.ones_like(group, dtype=torch.bool)
    return divide(rows, group_sum(won, group, everyone))


def logistic(z: Tensor, kind: str = "sigmoid", smoothing: float = 0.0) -> Tensor:
    """Loss of a preference whose margin is `z`; nothing saturates, any finite z gives a finite loss and slope.

    "sigmoid": −log σ(z). "conservative": −(1−e)·log σ(z) − e·log σ(−z), e the share of labels thought wrong (cDPO).
    "robust": [−(1−e)·log σ(z) + e·log σ(−z)]/(1−2e), unbiased under flips of that share (arXiv:2403.00409).

    >>> [round(float(x), 4) for x in logistic(torch.tensor([0.0, -300.0]))]
    [0.6931, 300.0]
    """
    e, right, wrong = smoothing, -logsigmoid(z), -logsigmoid(-z)
    if kind == "conservative":
        return (1 - e) * right + e * wrong
    return ((1 - e) * right - e * wrong) / (1 - 2 * e) if kind == "robust" else right


def preference_figures(
    score: Tensor, outcome: Tensor, group: Tensor, valid: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts over groups of the pairs' accuracy (a tied score counts half) and margin of `score` [B].

    Each group's figure is the mean over its pairs; the count is the number of groups with a pair.
    """
    better, worse = decided_pairs(outcome, group, valid)
    margin = (score[better] - score[worse]).detach()
    right = (margin > 0).to(margin.dtype) + (margin == 0).to(margin.dtype) / 2
    index = torch.unique(group[better])
    n = margin.new_tensor(float(len(index)))
    return {
        "pair_accuracy": (mean_over_pairs(right, better, group).sum(), n),
        "pair_margin": (mean_over_pairs(margin, better, group).sum(), n),
    }


def turn_means(x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
    """[B,T] the mean of `x` over the selected tokens of the same turn of the same row; 0 off the mask."""
    rows = torch.arange(len(turn), device=turn.device)[:, None].expand_as(turn)
    keys = torch.stack([rows[mask], turn[mask].to(rows.dtype)], -1)
    if not len(keys):
        return torch.zeros_like(x)
    _, index = torch.unique(keys, dim=0, return_inverse=True)
    everyone = torch.ones_like(index, dtype=torch.bool)
    total = group_sum(x[mask], index, everyone)
    means = divide(total, group_count(index, everyone, total))
    return torch.zeros_like(x).masked_scatter(mask, means)
