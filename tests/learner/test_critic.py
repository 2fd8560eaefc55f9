"""PPO's policy and critic as learners: one gradient however the batch is cut or padded, apart or on one trunk."""

import pytest
import tiny
import torch

import kenpo
from kenpo.learner import critic as critics
from kenpo.learner.critic import Critic
from kenpo.models.value_head import new_heads
from kenpo.ranks import Ranks
from learner.test_learner import D, flat, learner_of, rollouts

VALUES = frozenset({"values"})
NAMES = ["ppo", "vapo"]


@pytest.fixture(scope="module")
def models():
    return tiny.gpt2(dtype=D), tiny.qwen3(dtype=D, seed=5)


def judged(batch, critic):
    """The batch with what the critic said, and what had to be known of the policies."""
    return critic.look(frozenset({"values_old", "score_old"}), batch, batch.group.tolist(), {})


def apart(models, budget):
    """A policy and a critic with a model of its own."""
    policy = learner_of(models[0], budget)
    heads = new_heads(models[1], ("values",), seed=1)
    own = learner_of(models[1], budget, heads=heads, scalars_only=True)
    return policy, own, Critic(policy, own)


def wider(batch):
    """The same rows with padding in front of, between and behind nothing of theirs."""
    pad = lambda x, v: torch.nn.functional.pad(x, (3, 5), value=v)  # noqa: E731
    more = {n: pad(v, -1 if n == "tokens" else 0) for n, v in batch.tensors().items() if v.dim() == 2}
    return batch.replace(**more)


@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_is_one_however_the_batch_is_cut_or_padded(name, models):
    algorithm, found = kenpo.get(name), []
    for budget, change in ((10**6, None), (90, None), (40, None), (90, wider)):
        policy, own, critic = apart(models, budget)
        batch = rollouts(models[0])
        prepared = kenpo.prepare(algorithm, judged(batch if change is None else change(batch), critic))
        weighed = policy.weigh(prepared, algorithm)
        policy.gradient(prepared, algorithm, weighed=weighed)
        figures = own.gradient(prepared, algorithm, weighed=weighed).read(Ranks())[0]
        found.append([flat(x.scorer.named_parameters()) for x in (policy, own)])
        assert figures["value_loss"][0] > 0
        assert 0 < figures["value_loss_clipped"][1] == float(batch.mask.sum())
    for others in found[1:]:
        for got, want in zip(others, found[0], strict=True):
            assert float((got - want).norm()) <= 1e-12 * float(want.norm())
            assert float(want.norm()) > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_beside_a_critic_of_its_own_gets_nothing_of_the_value_loss(name, models):
    algorithm, (policy, _, critic) = kenpo.get(name), apart(models, 90)
    prepared = kenpo.prepare(algorithm, judged(rollouts(models[0]), critic))
    policy.gradient(prepared, algorithm)
    got = flat(policy.scorer.named_parameters())
    without = algorithm.but(regularizers=tuple(r for r in algorithm.regularizers if "values" not in r.needs))
    policy.gradient(prepared, without)
    assert torch.equal(got, flat(policy.scorer.named_parameters()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [10**6, 60])
def test_a_trunk_gets_the_sum_of_both(name, budget, models):
    """The gradient of one pass equals that of the policy's terms alone plus that of the value loss alone."""
    algorithm = kenpo.get(name)
    policy = learner_of(models[0], budget, heads=new_heads(models[0], ("values",), seed=1))
    prepared = kenpo.prepare(algorithm, judged(rollouts(models[0]), Critic(policy)))
    named = list(policy.scorer.named_parameters())
    policy.gradient(prepared, algorithm)
    together = flat(named)
    batch = kenpo.weigh(algorithm, prepared)
    total = torch.zeros_like(together)
    for of in ({"logp"}, {"values"}):
        for _, p in named:
            p.grad = None
        terms = policy.scorer.graph(prepared.rollouts, frozenset(of))
        kenpo.objective(algorithm, batch, terms, measure=False, of=of).loss.backward()
        assert float(flat(named).norm()) > 1e-6
        total += flat(named)
    assert float((together - total).norm()) <= 1e-12 * float(total.norm())


def test_figures_are_what_a_plain_count_gives(models):
    """Explained variance and the means by quarter, from lists of numbers."""
    algorithm, (_, _, critic) = kenpo.get("ppo"), apart(models, 90)
    prepared = kenpo.prepare(algorithm, judged(rollouts(models[0]), critic))
    found = critics.figures(prepared)
    quarters, everything = {n: [] for n in range(4)}, []
    rows = zip(
        prepared.rollouts.mask.tolist(), prepared.returns.tolist(), prepared.rollouts.values_old.tolist(), strict=True
    )
    for mask, returns, values in rows:
        places = [t for t, on in enumerate(mask) if on]
        for k, t in enumerate(places):
            quarters[4 * k // len(places)].append((returns[t], values[t]))
            everything.append((returns[t], values[t]))
    for n, pairs in quarters.items():
        assert found[f"returns/{n + 1}of4"] == pytest.approx((sum(r for r, _ in pairs), len(pairs)), abs=1e-9)
        assert found[f"values/{n + 1}of4"] == pytest.approx((sum(v for _, v in pairs), len(pairs)), abs=1e-9)
    spread = lambda xs: sum((x - sum(xs) / len(xs)) ** 2 for x in xs)  # noqa: E731
    want = 1 - spread([r - v for r, v in everything]) / spread([r for r, _ in everything])
    assert found["explained_variance"][0] == pytest.approx(want, abs=1e-9)


def test_a_value_counts_as_clipped_where_it_has_no_gradient():
    """Moved further than the clip towards the return; away from it, or over it and beyond, it keeps its gradient."""
    values, old, target = [0.5, 0.1, -0.5, 2.5, 0.2], [0.0] * 5, [1.0, 1.0, 1.0, 1.0, 0.1]
    pad = lambda row: torch.tensor([[0.0, *row]], dtype=D)  # noqa: E731
    stage = kenpo.get("ppo").with_settings({"regularizers.value_loss.clip": 0.2}).regularizers[0]
    mask = torch.tensor([[False] + [True] * 5])
    batch = kenpo.Rollouts(mask=mask, group=torch.tensor([0]), rewards=torch.zeros(1, dtype=D), values_old=pad(old))
    leaf = pad(values).requires_grad_()
    from kenpo.stages.context import Context

    ctx = Context(batch, torch.tensor([True]), kenpo.Policy(values=leaf), torch.zeros(1, 6, dtype=D), pad(target))
    stage(ctx)[mask].sum().backward()
    clipped = stage.clipped(ctx)[mask].tolist()
    assert clipped == [True, False, False, False, False]
    assert [g == 0 for g in leaf.grad[mask].tolist()] == clipped
