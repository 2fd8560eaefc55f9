"""A critic beside a policy, as stand-ins: an advantage that hands on returns, a value loss that reads them, and two
learners that ask for their own fields."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from laws.build import same, tensors
from reference.cases import make_case

import kenpo
from kenpo import stages as S
from kenpo.errors import IllegalCombinationError, MissingFieldError, UndeclaredFieldError
from kenpo.types import Advantaged


@dataclass(frozen=True)
class RewardToGo(S.Advantage):
    """The z-score, and the outcome itself as what the critic learns."""

    makes_returns = True

    def __call__(self, rewards, ctx, state):
        a, _ = S.GroupZScore()(rewards, ctx, None)
        return Advantaged(a, ctx.per_token(rewards), {"batches": (state or {"batches": 0})["batches"] + 1})


@dataclass(frozen=True)
class SquaredError(S.Regularizer):
    """Half the squared error of the critic, over tokens."""

    _needs = frozenset({"values", "returns"})

    def __call__(self, ctx):
        return 0.5 * (ctx.read("values") - ctx.returns) ** 2

    @property
    def own_aggregate(self):
        return S.TokenMean()


@dataclass(frozen=True)
class Entangled(S.Regularizer):
    """A penalty with gradients to both models."""

    _needs = frozenset({"logp", "values"})

    def __call__(self, ctx):
        return ctx.logp * ctx.read("values")


ACTOR_CRITIC = kenpo.get("dapo").but(
    name="actor_critic", selection=(), advantage=RewardToGo(), regularizers=(SquaredError(),)
)


def prepared(seed, **more):
    rollouts, policy = tensors(make_case(seed, critic=True, **more))
    return rollouts, policy, kenpo.weigh(ACTOR_CRITIC, kenpo.prepare(ACTOR_CRITIC, rollouts))


@pytest.mark.parametrize("seed", range(4))
def test_returns_reach_the_value_loss(seed):
    rollouts, policy, batch = prepared(seed)
    result = kenpo.evaluate(ACTOR_CRITIC, rollouts, policy, {"batches": 6})
    assert result.state == {"batches": 7}
    mask, n = rollouts.mask.tolist(), int(rollouts.mask.sum())
    for b, row in enumerate(mask):
        for t, trained in enumerate(row):
            want = (float(policy.values[b, t]) - float(rollouts.rewards[b])) / n if trained else 0.0
            assert float(result.gradients["values"][b, t]) == pytest.approx(want, abs=1e-12)
    assert same(batch.prepared.returns, rollouts.rewards.unsqueeze(1) * rollouts.mask)


@pytest.mark.parametrize("seed", range(4))
def test_each_learner_gets_its_own_part_from_its_own_terms(seed):
    rollouts, policy, batch = prepared(seed)
    whole = kenpo.evaluate(ACTOR_CRITIC, rollouts, policy)
    actor, mine = kenpo.coefficients(ACTOR_CRITIC, batch, kenpo.Policy(policy.logp), of={"logp"})
    critic, theirs = kenpo.coefficients(ACTOR_CRITIC, batch, kenpo.Policy(values=policy.values), of={"values"})
    assert mine.keys() == {"logp"}
    assert theirs.keys() == {"values"}
    assert same(mine["logp"], whole.gradients["logp"])
    assert same(theirs["values"], whole.gradients["values"])
    assert bool(theirs["values"].any())
    assert same(actor.loss + critic.loss, whole.loss.detach())
    assert critic.sums.keys() == {"squared_error"}
    assert "squared_error" not in actor.sums
    both, found = kenpo.coefficients(ACTOR_CRITIC, batch, policy, of={"logp", "values"})
    assert same(both.loss, whole.loss.detach())
    assert same(found["values"], theirs["values"])


def test_shares_of_one_learner_add_up():
    _rollouts, policy, batch = prepared(3)
    whole = kenpo.coefficients(ACTOR_CRITIC, batch, policy, of={"values"})[0].loss
    terms = kenpo.Policy(values=policy.values)
    rows = [[i] for i in range(len(batch))]
    parts = [kenpo.coefficients(ACTOR_CRITIC, batch[r], terms[r], of={"values"})[0].loss for r in rows]
    assert same(sum(parts), whole)


def test_a_term_of_both_models_is_refused():
    a = ACTOR_CRITIC.but(regularizers=(Entangled(),))
    actor, critic = {"logp", "entropy"}, {"values", "score"}
    assert ACTOR_CRITIC.crosses(actor, critic) is None
    assert a.crosses({*actor, *critic}) is None
    assert "entangled has gradients to 'logp' and 'values'" in a.crosses(actor, critic)
    assert ACTOR_CRITIC.reaches == {"logp", "values"}


def test_returns_that_nobody_makes_are_refused_when_the_algorithm_is_built():
    with pytest.raises(IllegalCombinationError, match="squared_error reads returns, which group_z_score does not make"):
        kenpo.get("grpo").but(regularizers=(SquaredError(),))
    assert "returns" not in ACTOR_CRITIC.needs
    assert "values" in ACTOR_CRITIC.needs


def test_undeclared_or_missing_returns_have_an_error_of_their_own():
    rollouts, _policy, batch = prepared(1)
    ctx = S.Context(rollouts, batch.prepared.selected, None, batch.advantages, batch.prepared.returns)
    with pytest.raises(UndeclaredFieldError, match="returns"):
        _ = ctx.of("Other", frozenset({"values"})).returns
    with pytest.raises(MissingFieldError, match="advantage that makes returns"):
        _ = S.Context(rollouts, batch.prepared.selected).of("Other", frozenset({"returns"})).returns


def test_a_policy_without_log_probs_says_what_is_missing():
    _rollouts, policy, batch = prepared(2)
    with pytest.raises(MissingFieldError, match="'logp', which the policy terms do not have"):
        kenpo.coefficients(ACTOR_CRITIC, batch, kenpo.Policy(values=policy.values))
    with pytest.raises(kenpo.errors.InputError, match="no term is given"):
        kenpo.Policy()
    with pytest.raises(kenpo.errors.InputError, match=r"policy\.score has shape"):
        kenpo.coefficients(ACTOR_CRITIC, batch, kenpo.Policy(score=torch.zeros(len(batch) + 1)), of={"values"})
