"""Returns: rewards spread over time."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import divide, select


def at_last_token(x: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B,T]: a rollout's number on its last trainable token, 0 elsewhere; an empty row holds none.

    >>> import torch
    >>> at_last_token(torch.tensor([5.0]), torch.tensor([[False, True, True, False]]))
    tensor([[0., 0., 5., 0.]])
    """
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return select(x.unsqueeze(-1), mask & (after == 1))


def return_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """[B,T] ``Σ_{k≥0} gamma^k · r_{t+k}`` over the trainable tokens from each one to the end; 0 off the mask.

    k counts trainable tokens: masked positions are stepped over.

    >>> import torch
    >>> x, mask = torch.tensor([[9.0, 1.0, 9.0, 2.0]]), torch.tensor([[False, True, False, True]])
    >>> return_to_go(x, mask)
    tensor([[0., 3., 0., 2.]])
    >>> return_to_go(x, mask, gamma=0.5)
    tensor([[0., 2., 0., 2.]])
    """
    if gamma == 1.0:
        return select(select(rewards, mask).flip(-1).cumsum(-1).flip(-1), mask)
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, last: Tensor | None = None
) -> Tensor:
    """[B,T] generalised advantages: ``A_t = δ_t + γλA_{t+1}`` with ``δ_t = r_t + γV_{t+1} − V_t``.

    "Next" is the next trainable token: masked positions are stepped over and never bootstrap. V after the last one is
    `last` [B], or 0. `lam` is a number, or one per row [B]. 0 off the mask. Source: arXiv:1506.02438.

    >>> x = [torch.tensor([v]) for v in ([0.0, 2.0, 0.0], [0.0, 0.0, 50.0], [True, True, False])]
    >>> gae(x[0], x[1], x[2], gamma=1.0, lam=0.5)
    tensor([[1., 2., 0.]])
    >>> gae(x[0], x[1], x[2], gamma=1.0, lam=0.5, last=torch.tensor([4.0]))
    tensor([[3., 6., 0.]])
    """
    ahead = rewards.new_zeros(len(rewards))
    ahead_value = torch.zeros_like(ahead) if last is None else last.to(ahead.dtype)
    found = []
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t]
        a = rewards[:, t] + gamma * ahead_value - values[:, t] + gamma * lam * ahead
        ahead, ahead_value = torch.where(on, a, ahead), torch.where(on, values[:, t], ahead_value)
        found.append(select(a, on))
    return torch.stack(found[::-1], 1) if found else torch.zeros_like(rewards)


def adaptive_lambda(length: Tensor, alpha: float) -> Tensor:
    """[B] ``max(0, 1 − 1/(alpha·n))``, n trainable tokens; 0 for an empty row. Source: VAPO, arXiv:2504.05118.

    >>> adaptive_lambda(torch.tensor([0.0, 10.0, 100.0, 1000.0]), 0.05)
    tensor([0.0000, 0.0000, 0.8000, 0.9800])
    """
    return select(1 - divide(torch.ones_like(length), alpha * length), length > 0).clamp(min=0)


def value_error(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``½ max((V − R)², (Vc − R)²)``, Vc = V held within ±`clip` of `old`; ``½ (V − R)²`` without a clip.

    The larger error counts, so a value that moved too far towards its return has no gradient. R and `old` are
    constants. Source: the PPO of arXiv:1707.06347 as released.

    >>> value_error(torch.tensor([0.5, -0.5]), torch.zeros(2), torch.ones(2), 0.25)
    tensor([0.2812, 1.1250])
    """
    plain = (values - returns).square()
    if clip is not None:
        held = values.clamp(old - clip, old + clip)
        plain = torch.where(held == values, plain, torch.maximum(plain, (held - returns).square()))
    return plain / 2
