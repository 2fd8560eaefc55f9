"""Rejection tests and the reproducible random numbers they use."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import select


def acceptance(log_ratio: Tensor, topk_log_ratio: Tensor, valid: Tensor, inside: Tensor) -> Tensor:
    """[B,T] ``min(1, r/M)``, M the largest ratio [B,T,K] over the `valid` top K; 0 where the token is not `inside`.

    Source: SIS, arXiv:2607.04728.
    """
    if not topk_log_ratio.shape[-1]:
        return torch.zeros_like(log_ratio)
    envelope = topk_log_ratio.masked_fill(~valid, -torch.inf).amax(-1)
    return select((log_ratio - envelope).clamp(max=0).exp(), inside & envelope.isfinite())


def token_draws(tokens: Tensor, logp: Tensor, mask: Tensor, seed: int) -> Tensor:
    """[B,T] numbers in [0, 1), uniform to the eye: a hash of seed, token, place in the response and log-prob's bits.

    The same token of the same response gets the same number wherever it stands in a batch.
    """
    place = mask.cumsum(-1)
    bits = logp.double().view(torch.int64)
    h = _mixed(torch.full_like(place, seed) + _mixed(bits) + _mixed(tokens.long() * 3 + 1) * 5 + _mixed(place) * 7)
    return ((h >> 11) & ((1 << 53) - 1)).double().mul(2.0**-53).to(logp.dtype).clamp(max=1 - 1e-7)


def _mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 wraps, shifts are made logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def row_draws(logp: Tensor, mask: Tensor) -> Tensor:
    """[B] numbers in [0, 1) that look random, made of each row's log-probs; rows of equal log-probs are tied."""
    total = select(logp.double(), mask).sum(-1)
    return (total * 1e3 * 0.6180339887498949).remainder(1.0)
