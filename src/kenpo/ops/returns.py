"""Returns: rewards spread over time."""

from __future__ import annotations

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
