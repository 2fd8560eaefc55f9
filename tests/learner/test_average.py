"""The moving average that teaches: its arithmetic, its state, adapters and low precision."""

import pytest
import tiny
import torch

import kenpo
from kenpo.learner.average import Average
from kenpo.learner.learner import Learner
from kenpo.models.lora import add_adapter
from kenpo.models.scorer import Scorer

KINDS = ["model", "adapter", "bfloat16"]


def made(kind, seed=1):
    model = tiny.llama(64, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, seed=seed)
    if kind == "adapter":
        pytest.importorskip("peft")
        add_adapter(model, 2, alpha=4.0)
    return Scorer(model)


def rows():
    tokens = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 9, 8, -1]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
    return kenpo.Rollouts(mask=mask, group=torch.tensor([0, 0]), rewards=torch.zeros(2), tokens=tokens)


def trained(scorer):
    return {n: p for n, p in scorer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
def test_it_follows_each_step_by_its_rate(kind):
    policy = made(kind)
    average = Average(policy, 0.25)
    want = {n: p.detach().double().clone() for n, p in trained(policy).items()}
    for _ in range(3):
        with torch.no_grad():
            for p in trained(policy).values():
                p.add_(torch.randn_like(p) * 0.1)
        average.follow()
        want = {n: 0.75 * want[n] + 0.25 * p.detach().double() for n, p in trained(policy).items()}
    state = average.state()
    assert state.keys() == {f"average.{n}" for n in want}
    for name, value in want.items():
        assert torch.allclose(state[f"average.{name}"].double(), value, atol=1e-6)
    assert not any(
        p.requires_grad for n, p in average.scorer.model.named_parameters() if ".average." in n or kind != "adapter"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_with_its_own_weights_and_comes_back(kind):
    policy, batch = made(kind), rows()
    before = policy.terms(batch).logp
    learner = Learner(policy)
    learner.average = Average(policy, 0.5)
    with torch.no_grad():
        for p in trained(policy).values():
            p.add_(torch.randn_like(p) * 0.1)
    assert torch.equal(learner.average.scorer.terms(batch).logp, before)  # the policy moved, its average did not
    learner.average.follow()
    seen, state = learner.average.scorer.terms(batch).logp, learner.state()
    assert not torch.equal(seen, before)

    again = Learner(made(kind))
    again.average = Average(again.scorer, 0.5)
    with torch.no_grad():
        for n, p in trained(again.scorer).items():
            p.copy_(trained(policy)[n])
    again.load(state)
    assert torch.equal(again.average.scorer.terms(batch).logp, seen)
    assert torch.equal(again.scorer.terms(batch).logp, policy.terms(batch).logp)


def test_a_step_moves_it():
    learner = Learner(made("model"))
    learner.average = Average(learner.scorer, 0.5)
    before = {n: t.clone() for n, t in learner.average.state().items()}
    for p in trained(learner.scorer).values():
        p.grad = torch.ones_like(p)
    learner.step(0.1)
    assert all(not torch.equal(t, before[n]) for n, t in learner.average.state().items())
