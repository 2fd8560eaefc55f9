"""Returns: rewards spread over time."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import select


def at_last_token(x: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B,T]: a rollout's number on its last trainable token, 0 elsewhere; an empty row holds none.

    >>> import torch
    >>> at_last_token(torch.tensor([5.0]), torch.tensor([[False, True, True, False]]))
    tensor([[0., 0., 5., 0.]])
    """
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return select(x.unsqueeze(-1), mask & (after == 1))


def return_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B,T] the sum of the rewards from each trainable token to the end, undiscounted; 0 off the mask.

    >>> import torch
    >>> return_to_go(torch.tensor([[9.0, 1.0, 9.0, 2.0]]), torch.tensor([[False, True, False, True]]))
    tensor([[0., 3., 0., 2.]])
    """
    return select(select(rewards, mask).flip(-1).cumsum(-1).flip(-1), mask)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[B,T] generalised advantages: ``A_t = δ_t + γλA_{t+1}`` with ``δ_t = r_t + γV_{t+1} − V_t``.

    "Next" is the next trainable token: masked positions are stepped over and never bootstrap; after the last one V
    is 0. 0 off the mask. Source: arXiv:1506.02438.

    >>> x = [torch.tensor([v]) for v in ([0.0, 2.0, 0.0], [0.0, 0.0, 50.0], [True, True, False])]
    >>> gae(x[0], x[1], x[2], gamma=1.0, lam=0.5)
    tensor([[1., 2., 0.]])
    """
    ahead, ahead_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    found = []
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t]
        a = rewards[:, t] + gamma * ahead_value - values[:, t] + gamma * lam * ahead
        ahead, ahead_value = torch.where(on, a, ahead), torch.where(on, values[:, t], ahead_value)
        found.append(select(a, on))
    return torch.stack(found[::-1], 1)
