"""A learner by itself: groups in one phase, two learners on one algorithm, state, weights."""

import pytest
import tiny
import torch
from seams.test_two_learners import ACTOR_CRITIC

import kenpo
from kenpo import stages as S
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.learner.optimizer import OptimizerOptions
from kenpo.models import lora
from kenpo.models.scorer import Scorer
from kenpo.models.value_head import new_heads
from kenpo.ranks import Ranks

D = torch.float64
PLAIN = OptimizerOptions(grad_clip=0.0)


def learner_of(model, budget=10**6, optimizer=PLAIN, **how):
    return Learner(Scorer(model, temperature=0.9, **how), LearnerOptions(budget, optimizer=optimizer))


def rollouts(model, groups=4, size=4, seed=0):
    """Groups of a prompt each, of odd lengths; the sampler stands near the model."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    tokens, mask = torch.full((rows, 26), -1), torch.zeros(rows, 26, dtype=torch.bool)
    for r in range(rows):
        prompt, n = 5 + r // size, int(torch.randint(2, 15, (), generator=g))
        tokens[r, :prompt] = 3 + (torch.arange(prompt) * (r // size + 1)) % 11
        tokens[r, prompt : prompt + n] = torch.randint(3, 64, (n,), generator=g)
        mask[r, prompt : prompt + n] = True
    rewards = (torch.arange(rows) % 2).to(D)
    made = kenpo.Rollouts(tokens=tokens, mask=mask, group=torch.arange(rows) // size, rewards=rewards)
    logp = Scorer(model, temperature=0.9).terms(made).logp
    noise = lambda s: logp + s * torch.randn(logp.shape, generator=g, dtype=D)  # noqa: E731
    return made.replace(logp_old=noise(0.2), logp_sampler=noise(0.2), logp_ref=noise(0.2), truncated=mask.sum(1) > 13)


def flat(named):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in named])


def directly(algorithm, scorer, batch, want=frozenset({"logp"})):
    """The gradient through autograd, of all rows at once."""
    named = list(scorer.named_parameters())
    for _, p in named:
        p.grad = None
    kenpo.evaluate(algorithm, batch, scorer.graph(batch, want)).loss.backward()
    return flat(named)


@pytest.fixture(scope="module")
def model():
    return tiny.gpt2(dtype=D)


@pytest.mark.parametrize("name", ["conspo", "ggpo", "gmc_grpo"])
@pytest.mark.parametrize("budget", [10**6, 90, 40])
def test_group_scope_takes_one_phase_where_groups_fit(model, monkeypatch, name, budget):
    algorithm, batch = kenpo.get(name), rollouts(model)
    learner = learner_of(model, budget)
    right = directly(algorithm, learner.scorer, batch)
    passes, backwards = [], []
    terms, backward = Scorer.terms, Scorer.backward
    monkeypatch.setattr(Scorer, "terms", lambda self, *a: passes.append(1) or terms(self, *a))

    def watched(self, part, *args, **how):
        backwards.append(part.group.tolist())
        return backward(self, part, *args, **how)

    monkeypatch.setattr(Scorer, "backward", watched)
    learner.gradient(kenpo.prepare(algorithm, batch), algorithm)
    got = flat(learner.scorer.named_parameters())
    assert float((got - right).norm()) <= 1e-12 * float(right.norm())
    assert float(right.norm()) > 1e-6
    if budget == 40:  # no group fits
        assert passes
        return
    assert len(passes) == 0
    assert len(backwards) == (1 if budget > 1000 else 4)
    assert all(groups == sorted(groups) or budget > 1000 for groups in backwards)


def test_whole_groups_stay_together_in_the_chunks_of_a_head(model):
    """Chunks of a few positions: a group is scored first and told at once."""
    algorithm, batch = kenpo.get("conspo"), rollouts(model)
    scorer = Scorer(model, temperature=0.9)
    right = directly(algorithm, scorer, batch)
    weighed = kenpo.weigh(algorithm, kenpo.prepare(algorithm, batch))
    asked = []

    def coefficients(rows, policy, measure):
        asked.append((rows.start, rows.stop))
        return kenpo.coefficients(algorithm, weighed[rows], policy, measure)[1]

    for _, p in scorer.named_parameters():
        p.grad = None
    scorer.backward(batch, coefficients, units=[4, 4, 4, 4], chunk=7)
    assert asked == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert float((flat(scorer.named_parameters()) - right).norm()) <= 1e-12 * float(right.norm())


@pytest.mark.parametrize("budget", [10**6, 70])
def test_a_policy_and_its_critic_on_one_algorithm(model, budget):
    """Two models, each with its own fields' coefficients; together they are the loss's gradients."""
    batch, critic_model = rollouts(model), tiny.gpt2(dtype=D, seed=7)
    policy = learner_of(model, budget)
    critic = learner_of(critic_model, budget, heads=new_heads(critic_model, ("values",), seed=1), scalars_only=True)
    logp = policy.scorer.graph(batch).logp
    values = critic.scorer.graph(batch, frozenset({"values"})).values
    for learner in (policy, critic):
        learner.optimizer.zero_grad()
    kenpo.evaluate(ACTOR_CRITIC, batch, kenpo.Policy(logp=logp, values=values)).loss.backward()
    right = [flat(learner.scorer.named_parameters()) for learner in (policy, critic)]
    prepared = kenpo.prepare(ACTOR_CRITIC, batch)
    assert (policy.fields(ACTOR_CRITIC), critic.fields(ACTOR_CRITIC)) == ({"logp"}, {"values"})
    figures = [learner.gradient(prepared, ACTOR_CRITIC).read(Ranks())[0] for learner in (policy, critic)]
    for learner, want in zip((policy, critic), right, strict=True):
        got = flat(learner.scorer.named_parameters())
        assert float((got - want).norm()) <= 1e-12 * float(want.norm())
        assert float(want.norm()) > 1e-6
    assert "squared_error" in figures[1]
    assert "squared_error" not in figures[0]


def test_a_critic_beside_a_policy_that_needs_two_phases(model):
    """The critic takes up what the policy weighed, and asks for its own fields in one phase."""
    algorithm = ACTOR_CRITIC.but(name="both", weights=(S.SecondMoment(0.01),))
    batch, critic_model = rollouts(model), tiny.gpt2(dtype=D, seed=7)
    policy = learner_of(model, 70)
    critic = learner_of(critic_model, 70, heads=new_heads(critic_model, ("values",), seed=1), scalars_only=True)
    prepared = kenpo.prepare(algorithm, batch)
    weighed = policy.weigh(prepared, algorithm)
    assert weighed.terms is not None
    policy.gradient(prepared, algorithm, weighed=weighed)
    critic.gradient(prepared, algorithm, weighed=weighed)
    got = [flat(learner.scorer.named_parameters()) for learner in (policy, critic)]
    logp = policy.scorer.graph(batch).logp
    values = critic.scorer.graph(batch, frozenset({"values"})).values
    for learner in (policy, critic):
        learner.optimizer.zero_grad()
    kenpo.evaluate(algorithm, batch, kenpo.Policy(logp=logp, values=values)).loss.backward()
    for learner, found in zip((policy, critic), got, strict=True):
        want = flat(learner.scorer.named_parameters())
        assert float((found - want).norm()) <= 1e-12 * float(want.norm())


def test_a_trunk_critic_learns_in_the_policy_s_pass(model):
    batch = rollouts(model)
    learner = learner_of(model, 70, heads=new_heads(model, ("values",), seed=1))
    right = directly(ACTOR_CRITIC, learner.scorer, batch, frozenset({"logp", "values"}))
    learner.gradient(kenpo.prepare(ACTOR_CRITIC, batch), ACTOR_CRITIC)
    got = flat(learner.scorer.named_parameters())
    assert float((got - right).norm()) <= 1e-12 * float(right.norm())


def test_state_goes_on_where_it_was(model):
    """Two steps in one go, or one, a state of plain tensors, and another."""
    algorithm = kenpo.get("gspo")

    def start():
        made = tiny.gpt2(dtype=D)
        return learner_of(made, heads=new_heads(made, ("values",), seed=1), optimizer=OptimizerOptions())

    def step(learner):
        learner.gradient(kenpo.prepare(algorithm, batch), algorithm)
        return learner.step(1e-2)

    batch = rollouts(model)
    through, first = start(), start()
    for learner in (through, first):
        assert step(learner) > 0
    second = start()
    with torch.no_grad():
        for (_, p), (_, q) in zip(second.scorer.named_parameters(), first.scorer.named_parameters(), strict=True):
            p.copy_(q)
    state = first.state()
    assert any(n.endswith("scalar_heads.values.weight") for n in state)
    second.load(state)
    step(through)
    step(second)
    for (_, p), (_, q) in zip(through.scorer.named_parameters(), second.scorer.named_parameters(), strict=True):
        assert torch.equal(p, q)


def test_weights_are_those_of_a_plain_model():
    made = tiny.llama(dtype=D)
    plain = {n: t.clone() for n, t in made.state_dict().items()}
    lora.add_adapter(made, 4, alpha=8)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p += 0.1
    learner = learner_of(made, heads=new_heads(made, ("values",)))
    given = dict(learner.weights())
    assert given.keys() == plain.keys()
    moved = {n for n in plain if not torch.equal(plain[n], given[n])}
    assert moved
    assert all("proj" in n for n in moved)
    other = tiny.llama(dtype=D, seed=5)
    other.load_state_dict(given)
    batch = rollouts(made)
    right = learner.scorer.terms(batch).logp
    assert torch.allclose(Scorer(other, temperature=0.9).terms(batch).logp, right, atol=1e-10)
