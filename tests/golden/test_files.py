"""Aggregation and the length penalty against their golden files; and which golden files still wait for code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import kenpo
from golden.given import context, tensor
from kenpo.stages import (
    FixedLength,
    GroupTokenMean,
    PartsZScore,
    SequenceMean,
    SequenceSum,
    SoftOverlong,
    TokenMean,
)

HERE = Path(__file__).parent


def cases(name):
    return [
        pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in json.loads((HERE / f"{name}.json").read_text())
    ]


def close(got, want):
    assert torch.allclose(torch.as_tensor(got, dtype=torch.float64), tensor(want), rtol=1e-9, atol=1e-12), (got, want)


@pytest.mark.parametrize(("i", "e"), cases("aggregation"))
def test_aggregation(i, e):
    """loss = Σ aggregate · penalty: a score function on logp = −values with A = 1 averages the values."""
    mask = torch.cat([torch.zeros(len(i["mask"]), 1), torch.tensor(i["mask"])], 1).bool()
    values = torch.cat([torch.zeros(len(i["mask"]), 1, dtype=torch.float64), tensor(i["values"])], 1)
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.tensor(i["group"]), rewards=torch.ones(len(mask), dtype=torch.float64)
    )
    operators = {"seq_mean": SequenceMean(), "token_mean": TokenMean(), "group_token": GroupTokenMean(),
                 "const": FixedLength(i["length"]), "seq_sum": SequenceSum()}  # fmt: skip
    for name, aggregate in operators.items():
        a = kenpo.get("rloo").but(advantage=One(), aggregate=aggregate)
        result = kenpo.evaluate(a, rollouts, kenpo.Policy(logp=-values))
        close(result.loss.detach(), e[name]["value"])
        close(-result.coefficients[:, 1:], e[name]["weights"])


class One(kenpo.stages.Advantage):
    """1 on every token."""

    def __call__(self, rewards, ctx, state):
        return ctx.per_token(torch.ones_like(rewards)), state


def of_lengths(lengths):
    """Rows of that many trainable tokens."""
    mask = torch.arange(1, max(lengths) + 1) <= torch.tensor(lengths).unsqueeze(-1)
    return context(mask=mask, logp=torch.zeros(mask.shape))


@pytest.mark.parametrize(("i", "e"), cases("overlong"))
def test_overlong(i, e):
    floor = {} if i["variant"] == "paper" else {"factor": i["factor"], "floor": None}
    stage = SoftOverlong(i["max_length"], i["buffer"], **floor)
    close(stage(torch.zeros(len(i["lengths"]), dtype=torch.float64), of_lengths(i["lengths"])), e["penalties"])


@pytest.mark.parametrize(("i", "e"), cases("overlong_no_floor"))
def test_a_length_penalty_without_a_floor(i, e):
    ctx, rewards = of_lengths(i["lengths"]), tensor(i["rewards"])
    stage = SoftOverlong(i["max_length"], i["buffer"], i["factor"], None)
    close(stage(rewards, ctx), e["shaped"])
    floored = SoftOverlong(i["max_length"], i["buffer"], i["factor"])
    close(floored(torch.zeros_like(rewards), ctx), e["penalties_floored"])


@pytest.mark.parametrize(("i", "e"), cases("gprl"))
def test_parts_judged_by_themselves(i, e):
    named = {f"axis {k}": tensor(v) for k, v in enumerate(i["axis_rewards"])}
    n = len(i["axis_rewards"][0])
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * n), group=torch.zeros(n, dtype=torch.int64),
        rewards=torch.zeros(n, dtype=torch.float64), reward_parts=named,
    )  # fmt: skip
    stage = PartsZScore(tuple(named), tuple(i["axis_weights"]), eps=i["eps"], ddof=i["ddof"])
    got = kenpo.prepare(kenpo.get("grpo").but(advantage=stage), rollouts.replace(logp_old=torch.zeros(n, 2)))
    close(got.advantages[:, 1], e["advantages"])


# Golden files of what is not catalogued (yet): no test may name them, so that this list cannot grow old.
WAITING = {
    "carl", "pass_at_k", "r3",
}  # fmt: skip


def test_every_other_golden_file_is_asserted_against_the_code():
    files = {p.stem for p in HERE.glob("*.json")} - {"formulas"}
    tests = [*HERE.glob("test_*.py"), *(HERE.parent / "algorithms").glob("test_*.py")]
    named = {n for t in tests for n in re.findall(r'cases\("(\w+)"[,)]', t.read_text(encoding="utf-8"))}
    assert files - named == WAITING
