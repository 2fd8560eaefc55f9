"""Golden inputs as a batch: a masked column is put first, because several cases train column 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kenpo
from kenpo import order
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

GOLDEN = Path(__file__).parent.parent / "golden"


def cases(name: str) -> list:
    """(inputs, expect) of every case of a golden file, as pytest parameters."""
    found = json.loads((GOLDEN / f"{name}.json").read_text())
    return [pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in found]


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def padded(rows) -> torch.Tensor:
    """[B,T] with a zero column on the left."""
    x = tensor(rows)
    return torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), x], 1)


def batch(i: dict, **more) -> tuple[kenpo.Rollouts, kenpo.Policy]:
    """Rollouts and Policy from golden inputs; `more` are further fields, already tensors."""
    mask = padded(i["mask"]).bool()
    known = {n: padded(v) for n, v in i.items() if isinstance(v, list) and n != "mask" and v and isinstance(v[0], list)}
    known |= more
    rollouts = {n: v for n, v in known.items() if n in ROLLOUT_FIELDS}
    policy = {n: v for n, v in known.items() if n in POLICY_FIELDS}
    policy.setdefault("logp", rollouts.get("logp_old", torch.zeros_like(mask, dtype=torch.float64)))
    group = torch.tensor(i.get("group", [0] * len(mask)))
    rewards = tensor(i.get("rewards", [0.0] * len(mask)))
    return kenpo.Rollouts(mask=mask, group=group, rewards=rewards, **rollouts), kenpo.Policy(**policy)


def view(stage, i: dict, **more) -> kenpo.stages.Context:
    """The stage's view of golden inputs, advantages as given."""
    rollouts, policy = batch(i, **more)
    advantages = tensor(i.get("advantages", [1.0] * len(rollouts))).unsqueeze(-1).expand(rollouts.mask.shape)
    advantages = torch.where(rollouts.mask, advantages, 0.0)
    selected = torch.ones(len(rollouts), dtype=torch.bool)
    return order.view(kenpo.stages.Context(rollouts, selected, policy, advantages), stage)


def evaluated(a: kenpo.Algorithm, i: dict, **more) -> kenpo.types.Result:
    """The algorithm on golden inputs, with the case's own advantages where it states them."""
    rollouts, policy = batch(i, **more)
    if "advantages" in i:
        rollouts = rollouts.replace(rewards=tensor(i["advantages"]))
        a = a.but(advantage=Given())
    return kenpo.evaluate(a, rollouts, policy)


class Given(kenpo.stages.Advantage):
    """The reward as it is, on every token."""

    def __call__(self, rewards, ctx, state):
        return ctx.per_token(rewards), state


def same(got: torch.Tensor, want) -> None:
    """Agree to 1e-9 relative, 1e-12 absolute; a leading extra column of `got` is dropped."""
    want = tensor(want)
    if got.dim() == 2 and got.shape[1] == want.shape[1] + 1:
        got = got[:, 1:]
    assert torch.allclose(got.double(), want, rtol=1e-9, atol=1e-12), (got, want)
