"""Contrasts between the members of a group: softmax-like objectives over sequence scores [B]."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.groups import group_count, group_max, group_sum, group_varies
from kenpo.ops.masked import divide, select


def group_log_sum_exp(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """On each row [B], log Σ e^x over the valid rows of its group; −inf where there are none."""
    top = group_max(x.detach(), group, valid)
    total = group_sum(select(x - top, valid).exp(), group, valid)
    some = total > 0
    return torch.where(some, torch.where(some, total, torch.ones_like(total)).log() + top, -torch.inf)


def info_nce(score: Tensor, right: Tensor, group: Tensor, valid: Tensor, *, tau: float, margin: float) -> Tensor:
    """[B] each right row's ``log q / |P|``, 0 on the others; q is its share against the wrong rows of its group.

    ``q_i = e^((s_i−margin)/tau) / (e^((s_i−margin)/tau) + Σ_wrong e^(s_j/tau))``. Only groups with both kinds of valid
    row count. The sum over a group's rows is its objective.
    """
    good, bad = right & valid, ~right & valid
    like = score.detach()
    usable = group_varies(right.to(like.dtype), group, valid)
    up = (score - margin) / tau
    against = group_log_sum_exp(score / tau, group, bad)
    gap = torch.where(usable, torch.where(usable, against, torch.zeros_like(against)) - up, torch.zeros_like(up))
    log_q = -torch.nn.functional.softplus(gap, threshold=50)
    return divide(select(log_q, usable & good), group_count(group, good, like))


def gibbs_gap(z: Tensor, outcome: Tensor, group: Tensor, valid: Tensor, carriers: Tensor) -> Tensor:
    """[B] ``mean z − log mean e^z`` of each row's group, in equal parts on the rows in `carriers`.

    Only groups whose valid rows differ in `outcome` count. Never positive in sum; 0 iff z is constant in each group.
    """
    like = z.detach()
    mixed = group_varies(outcome, group, valid)
    size = group_count(group, valid, like)
    top = group_max(like, group, valid)
    e = group_sum(select(z - top, valid).exp(), group, valid)
    log_mean = divide(e, size).clamp(min=torch.finfo(z.dtype).tiny).log() + top
    gap = divide(group_sum(z, group, valid), size) - log_mean
    here = carriers & mixed
    return divide(select(gap, here), group_count(group, here, like))
