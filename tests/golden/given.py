"""Golden inputs as tensors for the real code, and small views on it."""

from __future__ import annotations

import math
from typing import Any

import torch

import kenpo
from kenpo.order import view
from kenpo.stages import Context, TokenRatio
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

KINDS = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def same(got, want, tolerance: float) -> None:
    """Numbers, or nested lists of them, agree to an absolute tolerance."""
    got, want = torch.as_tensor(got, dtype=torch.float64), tensor(want)
    assert got.shape == want.shape
    assert bool(((got - want).abs() <= tolerance + 1e-12).all()), (got, want)


class Given(kenpo.stages.Advantage):
    """The reward as it is, on every token."""

    def __call__(self, rewards, ctx, state):
        return ctx.per_token(rewards), state


def batch(rewards=None, group=None, mask=None, **fields) -> tuple[kenpo.Rollouts, kenpo.Policy]:
    """Rows of fields behind one masked column; a flat list of [B,T] numbers is one row. `mask` None: all trained."""
    specs = ROLLOUT_FIELDS | POLICY_FIELDS
    made: dict[str, torch.Tensor] = {}
    for name, value in fields.items():
        kind = KINDS[specs[name].kind]
        x = value.to(kind) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=kind)
        if specs[name].axes.startswith("BT"):
            x = x.unsqueeze(0) if x.dim() < len(specs[name].axes) else x
            x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
        made[name] = x
    shape = next(v.shape for v in made.values() if v.dim() > 1)[:2]
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool)
    else:
        mask = torch.as_tensor(mask)
        mask = torch.cat([torch.zeros_like(mask[:, :1]), mask], 1).bool()
    mask[:, 0] = False
    made.setdefault("logp", torch.zeros(shape, dtype=torch.float64))
    rollouts = {n: v for n, v in made.items() if n in ROLLOUT_FIELDS}
    policy = {n: v for n, v in made.items() if n in POLICY_FIELDS}
    rewards = tensor([0.0] * shape[0] if rewards is None else rewards)
    group = torch.tensor([0] * shape[0] if group is None else group)
    return kenpo.Rollouts(mask=mask, group=group, rewards=rewards, **rollouts), kenpo.Policy(**policy)


def context(advantages: Any = 1.0, **fields) -> Context:
    """The batch as any stage may see it; advantages a number, [T] or [B,T]."""
    rollouts, policy = batch(**fields)
    a = tensor(advantages)
    a = torch.cat([torch.zeros_like(a[..., :1]), a], -1) if a.dim() else a
    a = torch.where(rollouts.mask, a.expand(rollouts.mask.shape), 0.0)
    policy.logp.requires_grad_()
    return Context(rollouts, torch.ones(len(rollouts), dtype=torch.bool), policy, a)


def weights(stage, advantages: Any = 1.0, **fields) -> torch.Tensor:
    """A weight's numbers, without the masked column; one row is flat."""
    ctx = context(advantages, **fields)
    w = stage(view(ctx, stage)).to(torch.float64).expand(ctx.mask.shape)[:, 1:]
    return w[0] if len(w) == 1 else w


def gains(surrogate, log_ratio, advantages: Any = 1.0, ratio=TokenRatio(), **fields):  # noqa: B008 - frozen
    """(objective, slope in log π) per token of one row whose ratio to π_old is e^`log_ratio`."""
    old = fields.pop("logp_old", [-3.0] * len(log_ratio))
    logp = [x + y for x, y in zip(log_ratio, old, strict=True)]
    ctx = context(advantages, logp=logp, logp_old=old, **fields)
    r = None if ratio is None else ratio(view(ctx, ratio))
    gain = surrogate(r, view(ctx, surrogate)).expand(ctx.mask.shape)[0, 1:]
    (slope,) = torch.autograd.grad(gain.sum(), ctx._core.policy.logp)
    return gain.detach(), slope[0, 1:]


def logs(values) -> list[float]:
    return [math.log(v) for v in values]
