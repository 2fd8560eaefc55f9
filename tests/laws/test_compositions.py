"""Corrections and masks over any algorithm: the same batch however it is cut, weights that multiply, whole groups."""

from __future__ import annotations

import pytest
import torch
from reference.cases import make_case

import kenpo
from kenpo.stages import SequenceMean
from laws.build import cut, same, shuffled, tensors, widened

pytestmark = pytest.mark.filterwarnings("ignore")

COMPOSED = {
    "gspo with IcePop": kenpo.get("gspo").adding("masked_is"),
    "dapo with M2PO and STAPO": kenpo.get("dapo").adding("second_moment").adding("spurious_tokens"),
    "icepop with a gate": kenpo.get("icepop").adding("ratio_gate"),
    "icepop, kept tokens only": kenpo.get("icepop").but(aggregate=SequenceMean(over="kept")),
    "tis with a divergence mask": kenpo.get("tis").adding("divergence_mask"),
    "cispo with KPop": kenpo.get("cispo").adding("binary_kl_mask"),
    "reinforce_pp with an entropy bonus and a KL": kenpo.get("reinforce_pp")
    .adding("entropy_bonus")
    .adding("kl_to_reference"),
    "pmpo with TRM": kenpo.get("pmpo").adding("sequence_kl_mask"),
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("fresh", [False, True])
def test_cuts_order_and_padding_change_nothing(name, fresh):
    a = COMPOSED[name]
    for seed in range(3):
        rollouts, policy = tensors(make_case(seed, fresh=fresh))
        whole = kenpo.evaluate(a, rollouts, policy)
        order = shuffled(len(rollouts), seed)
        moved = kenpo.evaluate(a, widened(rollouts, 2)[order], widened(policy, 2)[order])
        assert same(moved.coefficients[:, : rollouts.mask.shape[1]], whole.coefficients[order])
        two = a.two_phase(rollouts) is not None
        batch = kenpo.weigh(a, kenpo.prepare(a, rollouts), policy if two else None)
        for rows in cut(len(rollouts), 4):
            share, gradients = kenpo.coefficients(a, batch[rows], policy[rows])
            assert same(gradients["logp"], whole.coefficients[rows], 1e-9)
            assert same(share.weights, whole.weights[rows], 0.0)


@pytest.mark.parametrize("name", COMPOSED)
def test_weights_multiply(name):
    a = COMPOSED[name]
    rollouts, policy = tensors(make_case(4))
    whole, product = kenpo.evaluate(a, rollouts, policy).weights, None
    for stage in a.weights:
        alone = kenpo.evaluate(a.but(weights=(stage,)), rollouts, policy).weights
        product = alone if product is None else product * alone
    if product is not None:
        assert torch.equal(whole, product)


@pytest.mark.parametrize("name", ["gmc_grpo", "zcpo"])
def test_a_minibatch_that_splits_a_group_is_refused(name):
    a = kenpo.get(name)
    rollouts, policy = tensors(make_case(5, uniform_group=False, single_group=False))
    prepared = kenpo.prepare(a, rollouts)
    with pytest.raises(kenpo.errors.ScopeError, match="splits one"):
        kenpo.weigh(a, prepared[1:], policy[1:])
    whole = prepared.rollouts.group == prepared.rollouts.group[0]
    kenpo.weigh(a, prepared[whole], policy[whole])


def test_a_surrogate_that_couples_rollouts_takes_the_minibatch_whole():
    a = kenpo.get("conspo")
    rollouts, policy = tensors(make_case(6))
    batch = kenpo.weigh(a, kenpo.prepare(a, rollouts), policy)
    with pytest.raises(kenpo.errors.ScopeError, match="couples the rollouts of a group, but the microbatch splits one"):
        kenpo.objective(a, batch[:3], policy[:3])


def test_effective_sample_size():
    a = kenpo.get("tis")
    result = kenpo.evaluate(a, *tensors(make_case(7)))
    rollouts, _ = tensors(make_case(7))
    w = result.weights[rollouts.mask]
    assert same(
        torch.tensor(result.metrics["effective_sample_size"]), (w.sum() ** 2 / (len(w) * (w * w).sum())).float(), 1e-6
    )


class Everywhere(kenpo.stages.Advantage):
    """1 on every position, also where there is nothing to train: a stage that was written carelessly."""

    def __call__(self, rewards, ctx, state):
        return torch.ones_like(ctx.mask, dtype=rewards.dtype), state


def test_advantages_vanish_off_the_mask_and_on_dropped_rows():
    a = kenpo.get("dapo").but(advantage=Everywhere())
    rollouts, policy = tensors(make_case(3))
    result = kenpo.evaluate(a, rollouts, policy)
    trained = rollouts.mask & kenpo.select(a, rollouts).unsqueeze(-1)
    assert torch.equal(result.advantages != 0, trained)


def test_kept_means_as_if_the_dropped_tokens_were_not_there():
    a = COMPOSED["icepop, kept tokens only"]
    for seed in range(4):
        rollouts, policy = tensors(make_case(seed, sampler_gap=0.8))
        whole = kenpo.evaluate(a, rollouts, policy)
        without = kenpo.evaluate(a, rollouts.replace(mask=whole.weights > 0), policy)
        assert bool((whole.weights == 0)[rollouts.mask].any())
        assert same(without.coefficients, whole.coefficients)
        assert same(without.loss, whole.loss)


class Constant(kenpo.stages.Surrogate):
    """The same number everywhere, or an infinity where the advantage is 0: a stage that ignores the advantage."""

    takes_ratio = False

    def __call__(self, ratio, ctx):
        return torch.where(ctx.advantages == 0, VALUE[0], 1.0) + 0 * ctx.logp


VALUE = [1.0]


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_an_advantage_of_zero_contributes_exactly_zero(value):
    VALUE[0] = value
    a = kenpo.get("rloo").but(surrogate=Constant())
    rollouts, policy = tensors(make_case(2))
    result = kenpo.evaluate(a, rollouts, policy)
    counted = (result.advantages != 0).sum().double() / len(rollouts)
    assert same(result.loss.detach(), -counted)
    assert not bool(result.coefficients.any())
