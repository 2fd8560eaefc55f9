"""Log-ratios and the ratios made from them: per token, per sequence, power means."""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.ops.masked import at_hand, row_mean, row_sum, select

#: Log-ratios saturate here: exp(20) is about 4.9e8, far beyond any clip range, and finite in float32 when squared.
LIMIT = 20.0


def saturate(x: Tensor) -> Tensor:
    """`x` held within ±20; the gradient is 0 outside. A finite log-prob then never gives a non-finite loss.

    >>> saturate(torch.tensor([-50.0, 0.5, 120.0]))
    tensor([-20.0000,   0.5000,  20.0000])
    """
    if x.requires_grad and within_limit(x):  # the usual case: no clamp, and no gradient of one
        return x
    return x.clamp(-LIMIT, LIMIT)


def within_limit(x: Tensor) -> bool:
    """Whether every entry lies within ±20: one pass, false for NaN, infinities, an empty tensor and what is not
    `at_hand`."""
    if not x.numel() or not at_hand(x):
        return False
    low, high = torch.aminmax(x.detach())
    return bool((low >= -LIMIT) & (high <= LIMIT))


def log_ratio(logp: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """[B,T] ``log π − log anchor``, saturated at ±20, 0 off the mask."""
    return saturate(select(logp, mask) - select(anchor, mask))


def sequence_log_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B,1] mean log-ratio of each row: the log of the geometric mean of its token ratios. 0 for an empty row."""
    return row_mean(log_ratio, mask).unsqueeze(-1)


def sequence_log_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B,1] log of the product of a row's token ratios, saturated at ±20."""
    return saturate(row_sum(log_ratio, mask)).unsqueeze(-1)


def bound_outward(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Log-ratios held on the side the advantage pushes: at most `high` where A > 0, at least −`low` where A < 0.

    Bounds are distances in log space. The gradient is 0 where the bound acts. Source: GMPO, arXiv:2507.20673.
    """
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio)
    return torch.where(advantages < 0, log_ratio.clamp(min=-low), bounded)


def through_own_token(value: Tensor, log_ratio: Tensor) -> Tensor:
    """A sequence value whose gradient runs through each token's own log-ratio: ``sg[value] · π / sg[π]`` (GSPO-token).

    A token whose log-ratio is saturated or held by a bound has no gradient, as in the sequence's own ratio.
    """
    return value.detach() * (log_ratio - log_ratio.detach()).exp()


def log_prefix_min(log_ratio: Tensor, mask: Tensor, *, strict: bool) -> Tensor:
    """[B,T] log of the smallest token ratio before each position (``strict``) or up to it; masked tokens are skipped.

    0 where nothing precedes. A constant. Source: MinPRO, arXiv:2601.22718.

    >>> x, mask = torch.tensor([[0.0, 0.2, -0.1, 0.4]]), torch.tensor([[False, True, True, True]])
    >>> log_prefix_min(x, mask, strict=True)
    tensor([[ 0.0000,  0.0000,  0.2000, -0.1000]])
    """
    x = torch.where(mask, log_ratio.detach(), torch.inf)
    if x.numel():
        x = x.cummin(-1).values
    if strict:
        x = torch.cat([x.new_full((x.shape[0], 1), torch.inf), x[:, :-1]], -1)[:, : x.shape[1]]
    return torch.where(x.isinf(), x.new_zeros(()), x)


def log_power_mean(log_ratio: Tensor, p: Tensor | float, mask: Tensor) -> Tensor:
    """[B,1] ``log (mean_t r^p)^(1/p)`` of each row, p [B,1] or a number in [0, 1]; p = 0 is the geometric mean.

    By expm1 and log1p around the row's largest entry, so that it is exact for small p and finite for saturated ratios.
    0 for an empty row. Differentiable in the ratios, not in p.

    >>> x, mask = torch.tensor([[0.0, 1.0]]).log1p(), torch.tensor([[True, True]])
    >>> log_power_mean(x, 1.0, mask).exp()
    tensor([[1.5000]])
    """
    if not isinstance(p, Tensor) and p == 0:
        return sequence_log_mean(log_ratio, mask)
    top = row_max(log_ratio.detach(), mask)
    if not isinstance(p, Tensor):
        return top + row_mean(((log_ratio - top) * p).expm1(), mask).log1p().unsqueeze(-1) / p
    flat = p < 1e-12
    power = torch.where(flat, torch.ones_like(p), p)
    mean = top + row_mean(((log_ratio - top) * power).expm1(), mask).log1p().unsqueeze(-1) / power
    return torch.where(flat, sequence_log_mean(log_ratio, mask), mean) if bool(flat.any()) else mean


def log_variance_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    """``log [p(1−p) / (p_old(1−p_old))]``, saturated at ±20; exact for p near 1. Source: ReCo, arXiv:2607.26862.

    >>> log_variance_ratio(torch.tensor(0.95).log(), torch.tensor(0.9).log()).exp()
    tensor(0.5278)
    """
    tiny = torch.finfo(logp.dtype).tiny
    rest, rest_old = (-torch.expm1(x.clamp(max=0)).clamp(max=-tiny) for x in (logp, logp_old))
    return saturate(logp - logp_old + rest.log() - rest_old.log())


def router_log_shift(change: Tensor, layers: str) -> Tensor:
    """[B,T,L,K] changes of the routers' log-scores at the old experts -> [B,T] log γ ≤ 0, γ = 1 iff nothing moved.

    ``geometric``: −mean over layers of mean over experts of |change|; ``product``: the sum over layers instead.
    ``fork_geometric``, ``fork_product``: each layer's factor is the mean over experts of exp(−|change|).
    Source: RSPO, arXiv:2510.23027.
    """
    drift = saturate(change).abs()
    layer = (-drift).exp().mean(-1).log() if layers.startswith("fork_") else -drift.mean(-1)
    return layer.mean(-1) if layers.endswith("geometric") else layer.sum(-1)


def row_max(x: Tensor, mask: Tensor) -> Tensor:
    """[B,1] the largest selected entry of each row; 0 for an empty row."""
    if not x.numel():
        return x.new_zeros((x.shape[0], 1))
    top = x.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    return torch.where(top.isinf(), x.new_zeros(()), top)


def ess_exponent(log_ratio: Tensor, held: Tensor, mask: Tensor) -> Tensor:
    """[B,1] PMPO's exponent p in [0, 1] of each row: ``ESS(p) = (1−f)·ESS(1) + f·n``.

    ESS(p) = (Σ r^p)² / Σ r^2p is the effective number of tokens that share the power mean's gradient: n at p = 0,
    falling in p. f is the share of `held` (clipped) tokens. Equal ratios and empty rows: 1. A constant. Solved for all
    rows at once by safeguarded Newton steps in p², in which log ESS is close to a straight line.
    """
    n = mask.sum(-1, dtype=log_ratio.dtype)
    top = row_max(log_ratio, mask)
    x = torch.where(mask, log_ratio - top, -1e30)  # e^px is 0 off the mask, and so is its product with x
    f = (held & mask).sum(-1, dtype=n.dtype) / n.clamp(min=1)
    e = x.exp()
    total = e.sum(-1)
    flat = total == n
    at_one = total.square() / _dot(e, e).clamp(min=torch.finfo(e.dtype).tiny)
    target = ((1 - f) * at_one + f * n).clamp(min=torch.finfo(e.dtype).tiny).log()
    fixed = flat | (f == 0) | (f == 1)
    p = torch.where(flat | (f < 1), torch.ones_like(n), torch.zeros_like(n))
    rows = (~fixed).nonzero().squeeze(-1)
    if len(rows):
        top_ess, low_ess = n[rows].log(), at_one[rows].log()
        guess = ((top_ess - target[rows]) / (top_ess - low_ess).clamp(min=torch.finfo(e.dtype).tiny)).clamp(0, 1)
        p[rows] = _solve_ess(x if len(rows) == len(x) else x[rows], target[rows], guess)
    return p.unsqueeze(-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


def _solve_ess(x: Tensor, target: Tensor, guess: Tensor, steps: int = 60) -> Tensor:
    """p [B] with ``log ESS(p) = target``; x [B,T] ≤ 0, −1e30 where there is no token; `guess` [B] of p².

    A Newton step squares the error, so the last one is taken when the step before it was below the root of the
    precision.
    """
    e, weighted = torch.empty_like(x), torch.empty_like(x)
    low, high, q = torch.zeros_like(guess), torch.ones_like(guess), guess.clamp(min=1e-6)
    precision = torch.finfo(x.dtype).eps
    for _ in range(steps):
        p = q.sqrt()
        torch.mul(x, p.unsqueeze(-1), out=e).exp_()
        torch.mul(e, x, out=weighted)
        s1, s2 = e.sum(-1), _dot(e, e)
        gap = 2 * s1.log() - s2.log() - target
        low, high = torch.where(gap > 0, q, low), torch.where(gap > 0, high, q)
        slope = (weighted.sum(-1) / s1 - _dot(e, weighted) / s2) / p  # d log ESS / d q, negative
        step = q - gap / slope
        newton = (step >= low) & (step <= high)
        new = torch.where(newton, step, (low + high) / 2)
        exact = gap.abs() <= 8 * precision
        done = exact | (newton & ((new - q).abs() <= precision**0.5 * q)) | ((high - low) <= 8 * precision * q)
        q = torch.where(exact, q, new)
        if bool(done.all()):
            break
    return q.sqrt()
