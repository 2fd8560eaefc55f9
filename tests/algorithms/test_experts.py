"""Data from elsewhere: privileged prompts, another model's groups, replaced failures, and cross-entropy beside GRPO."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from golden.given import Given, batch, tensor
from laws.build import same, tensors
from reference.cases import make_case

import kenpo
from kenpo.errors import IllegalCombinationError, InputError
from kenpo.experience.exchange import exchanged, replaced
from kenpo.stages import Clip, Compatibility, GroupZScore, OffContext, OwnZScore, TokenRatio, TruncatedIS

HERE = Path(__file__).parents[1] / "golden"


def cases(name):
    return [
        pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in json.loads((HERE / f"{name}.json").read_text())
    ]


def close(got, want):
    assert torch.allclose(torch.as_tensor(got, dtype=torch.float64), tensor(want), rtol=1e-9, atol=1e-12), (got, want)


@pytest.mark.parametrize(("i", "e"), cases("oc_grpo"))
def test_off_context(i, e):
    guided = [g if on else o for g, o, on in zip(i["logp_guided"], i["logp_old"], i["guided"], strict=True)]
    rollouts, policy = batch(
        i["advantages"], mask=i["mask"], logp=i["logp"], logp_old=i["logp_old"], logp_guided=guided
    )
    stage = OffContext(i["power"], i["floor"], i["cap"], "sequence" if i["variant"] == "response" else "token")
    a = kenpo.get("oc_grpo").but(advantage=Given(), weights=(stage,), surrogate=Clip(i["clip"], i["clip"]))
    result = kenpo.evaluate(a, rollouts, policy)
    close(result.weights[:, 1:], e["weights"])
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


def test_without_a_hint_off_context_is_grpo():
    rollouts, policy = tensors(make_case(4))
    rollouts = rollouts.replace(logp_guided=rollouts.logp_old)
    a = kenpo.get("oc_grpo")
    assert same(
        kenpo.evaluate(a, rollouts, policy).coefficients,
        kenpo.evaluate(a.but(weights=()), rollouts, policy).coefficients,
    )


def test_the_hint_is_a_mismatch_that_is_counted_once():
    with pytest.raises(IllegalCombinationError, match="twice"):
        kenpo.get("oc_grpo").but(weights=(OffContext(), TruncatedIS()))
    with pytest.raises(IllegalCombinationError, match="twice"):
        kenpo.get("oc_grpo").but(ratio=TokenRatio(anchor="sampler"))
    for bad in ({"power": 0.0}, {"floor": 1.5}, {"cap": 0.5}):
        with pytest.raises(InputError, match="off_context"):
            OffContext(**bad)


@pytest.mark.parametrize(("i", "e"), cases("graft_source"))
def test_a_peers_group_keeps_its_own_statistics(i, e):
    """The exchanged group has an id of its own; one id for both is the wrong way and gives other advantages."""
    source = [math.nan if row is None else math.fsum(row) / len(row) for row in i["source_logp"]]
    group = [2 * g + s for g, s in zip(i["group"], i["source"], strict=True)]
    fields = {n: i[n] for n in ("logp", "logp_old")} | {"logp_source": source}
    a = kenpo.get("graft").but(advantage=GroupZScore(ddof=i["ddof"]), weights=(Compatibility(i["threshold"]),),
                               surrogate=Clip(i["low"], i["high"]))  # fmt: skip
    rollouts, policy = batch(i["rewards"], group, i["mask"], **fields)
    result = kenpo.evaluate(a, rollouts, policy)
    first = rollouts.mask.long().argmax(-1, keepdim=True)
    filled = rollouts.mask.any(-1)
    close(result.advantages.gather(1, first).squeeze(1)[filled], tensor(e["advantages"])[filled].tolist())
    close(result.weights.gather(1, first).squeeze(1)[filled], tensor(e["weights"])[filled].tolist())
    assert float(kenpo.weigh(a, kenpo.prepare(a, rollouts)).totals.kept_tokens) == e["denominator"]
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])
    joint = kenpo.prepare(a, rollouts.replace(group=torch.tensor(i["group"])))
    wrong = joint.advantages.gather(1, first).squeeze(1)[filled]
    close(wrong, tensor(e["advantages_joint"])[filled].tolist())
    assert not torch.allclose(wrong, result.advantages.gather(1, first).squeeze(1)[filled])


@pytest.mark.parametrize(("i", "e"), cases("graft_exchange"))
def test_which_groups_are_exchanged(i, e):
    assert exchanged(i["samples"], i["correct_a"], i["correct_b"]) == (e["to_a"], e["to_b"])


@pytest.mark.parametrize(("i", "e"), cases("repo_swap"))
def test_which_failure_is_replaced(i, e):
    """A replaced row has the advantage of the group as it is then, not that of the failure that it replaced."""
    a = kenpo.get("repo").but(advantage=GroupZScore(ddof=0))
    for rewards, rephrased, want in zip(i["rewards"], i["rephrased_reward"], e["groups"], strict=True):
        place = replaced(rewards, rephrased, delta=i["delta"], rho=i["rho"])
        assert place == want["replaced"]
        assert sum(r < i["delta"] for r in rewards) / len(rewards) == want["failure_rate"]
        final = [rephrased if k == place else r for k, r in enumerate(rewards)]
        assert final == want["rewards"]
        rollouts, _ = batch(final, logp=[[-1.0]] * len(final))
        close(kenpo.prepare(a, rollouts).advantages[:, 1], want["advantages_population"])


def test_what_is_not_swapped():
    failed = [0.0, 0.0, 0.0, 0.0]
    assert replaced(failed, 1.0) == 0
    assert replaced(failed, 1.0, truncated=True) is None
    assert replaced(failed, math.nan) is None
    assert replaced([math.nan] * 3, 1.0) is None
    assert replaced([math.nan, 0.0, -1.0], 1.0) == 2
    with pytest.raises(InputError, match="rho"):
        replaced(failed, 1.0, rho=2.0)
    with pytest.raises(InputError, match="prompts"):
        exchanged(4, [0], [1, 2])


def test_an_experts_trace_enters_cross_entropy_alone():
    """Whatever its reward, the policy's rows keep their coefficients; the expert's get −coef over its tokens."""
    rollouts, policy = tensors(make_case(8, experts=True))
    a, expert = kenpo.get("sft_mixture"), rollouts.origin == 2
    rewarded = rollouts.replace(rewards=torch.where(expert, 9.0, rollouts.rewards))
    got = kenpo.evaluate(a, rewarded, policy).coefficients
    tokens = rollouts.mask & expert.unsqueeze(-1)
    assert torch.allclose(got[tokens], got.new_tensor(-1.0) / tokens.sum(), atol=1e-15)
    alone = kenpo.evaluate(
        kenpo.get("grpo").but(regularizers=(), aggregate=a.aggregate), rollouts[~expert], policy[~expert]
    )
    assert same(got[~expert], alone.coefficients)
    with pytest.raises(InputError, match="inside"):
        OwnZScore(inside=True)
