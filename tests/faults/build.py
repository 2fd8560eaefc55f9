"""Small batches by hand, in float64, with one masked column in front."""

from __future__ import annotations

import torch

import kenpo
from kenpo import stages as S

D = torch.float64


def batch(rows: list[list[float]], rewards, group=None, *, masks=None, old=None, sampler=None, ref=None, **fields):
    """Rollouts and Policy from per-token log-probs of unequal lengths; `masks` defaults to all ones."""
    width = max(map(len, rows)) + 1

    def pad(values, fill=0.0):
        return torch.tensor([[fill, *map(float, v), *[fill] * (width - 1 - len(v))] for v in values], dtype=D)

    mask = pad(masks or [[1] * len(r) for r in rows]).bool()
    extra = {n: pad(v) for n, v in {"logp_old": old, "logp_sampler": sampler, "logp_ref": ref}.items() if v is not None}
    rollouts = kenpo.Rollouts(
        mask=mask,
        group=torch.tensor(group if group is not None else [0] * len(rows)),
        rewards=torch.tensor([float("nan") if r is None else r for r in rewards], dtype=D),
        **extra,
        **fields,
    )
    return rollouts, kenpo.Policy(pad(rows))


class Given(S.Advantage):
    """The rewards themselves as advantages: for tests that start from an advantage."""

    def __call__(self, rewards, ctx, state):
        return ctx.per_token(rewards), state


def plain(**slots) -> kenpo.Algorithm:
    """PPO's clip with advantages given as rewards and a token mean; slots may be replaced."""
    base = {"advantage": Given(), "ratio": S.TokenRatio(), "surrogate": S.Clip(), "aggregate": S.TokenMean()}
    return kenpo.Algorithm("plain", "test", **{**base, **slots})


def advantages(algorithm, rewards, group) -> list[float]:
    """Each rollout's advantage on its one token."""
    rollouts, policy = batch([[-1.0]] * len(rewards), rewards, group)
    return kenpo.evaluate(algorithm, rollouts, policy).advantages[:, 1].tolist()
