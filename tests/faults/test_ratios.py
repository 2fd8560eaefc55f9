"""Faults of other trainers in ratios, masks, and KL or entropy terms: the right values."""

from __future__ import annotations

import math

import pytest
import torch

import kenpo
from faults.build import batch, plain
from kenpo import stages as S
from kenpo.errors import InputError, NonFiniteError
from kenpo.ops import divergences


@pytest.mark.parametrize(("mask", "right"), [([1, 1], -1.2), ([0, 1], 0.0)])
def test_a_huge_ratio_is_finite_in_value_and_gradient(mask, right):
    f32 = torch.float32
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[0, mask[0]]]).bool(),
        group=torch.tensor([0]),
        rewards=torch.tensor([1.0]),
        logp_old=torch.tensor([[0.0, -120.0]], dtype=f32),
    )
    result = kenpo.evaluate(plain(), rollouts, kenpo.Policy(torch.tensor([[0.0, -0.1]], dtype=f32)))
    assert float(result.loss.detach()) == pytest.approx(right, abs=1e-6)
    assert result.coefficients.tolist() == [[0.0, 0.0]]


def test_sequence_ratios_broadcast_over_rows_not_columns():
    rollouts, policy = batch([[-1.0, -1.0], [-1.0, -1.0]], [1.0, 1.0],
                             old=[[-1.0, -1.0], [-1.0 - math.log(2)] * 2])  # fmt: skip
    seen = {}

    class Spy(S.Linear):
        def __call__(self, ratio, ctx):
            seen["ratio"] = ratio.detach()
            return super().__call__(ratio, ctx)

    kenpo.evaluate(plain(ratio=S.SequenceRatio(), surrogate=Spy()), rollouts, policy)
    assert seen["ratio"][:, 1:].tolist() == [[1.0, 1.0], [pytest.approx(2.0), pytest.approx(2.0)]]


@pytest.mark.parametrize("n", [2, 3])
def test_average_ratio_and_weight_of_equal_rows_are_one(n):
    rollouts, policy = batch([[-1.0]] * n, [1.0] * n, old=[[-1.0]] * n, truncated=torch.tensor([False] * n))
    metrics = kenpo.evaluate(plain(weights=(S.Untruncated(),)), rollouts, policy).metrics
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["weight"] == pytest.approx(1.0)
    assert metrics["effective_sample_size"] == pytest.approx(1.0)


def test_a_masked_entry_has_no_influence_on_a_sequence_ratio():
    results = []
    for masked in (-2.0, -6.0, math.nan):
        rollouts, policy = batch([[-1.0, -1.2], [-0.9, masked]], [1.0, -1.0], masks=[[1, 1], [1, 0]],
                                 old=[[-1.1, -1.0], [-1.0, -1.0]])  # fmt: skip
        results.append(kenpo.evaluate(plain(ratio=S.SequenceRatio(), aggregate=S.SequenceMean()), rollouts, policy))
    for r in results[1:]:
        assert torch.equal(r.coefficients, results[0].coefficients)
        assert torch.equal(r.loss, results[0].loss)
    assert float(results[0].coefficients[1, 2]) == 0.0


def test_masked_nan_and_infinity_are_selected_away():
    rollouts, policy = batch([[-1.0, -1.0]], [1.0], masks=[[1, 0]], old=[[-1.0, math.nan]], ref=[[-1.0, -1e10]])
    a = plain(regularizers=(S.KLToReference(),))
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.loss.detach()) == pytest.approx(-1.0, abs=1e-12)
    assert bool(torch.isfinite(result.coefficients).all())


def test_a_nan_log_prob_of_the_sampler_is_named():
    rollouts, policy = batch([[-0.5, -0.4, -0.3]], [1.0], sampler=[[-0.5, math.nan, -0.3]])
    with pytest.raises(NonFiniteError, match=r"logp_sampler.*\[0, 2\]"):
        kenpo.evaluate(plain(ratio=S.TokenRatio(anchor="sampler")), rollouts, policy)


def test_a_stored_old_log_prob_is_used():
    rollouts, policy = batch([[-0.8]], [1.0], old=[[-1.0]])
    assert kenpo.evaluate(plain(surrogate=S.Linear()), rollouts, policy).metrics["ratio"] == pytest.approx(
        1.2214, abs=5e-5
    )


def test_tokens_scored_one_place_off_show_in_the_ratio():
    rollouts, policy = batch([[-1.0, -3.0]], [1.0], sampler=[[-1.0, -3.0]])
    a = plain(ratio=S.TokenRatio(anchor="sampler"), surrogate=S.Linear())
    assert kenpo.evaluate(a, rollouts, policy).metrics["ratio_max"] == pytest.approx(1.0)


# -- KL and entropy -------------------------------------------------------------------------------------------------


def test_the_kl_term_has_a_gradient():
    rollouts, policy = batch([[-1.0]], [0.0], ref=[[-1.5]])
    a = plain(regularizers=(S.KLToReference(beta=0.1),))
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.loss.detach()) == pytest.approx(0.1 * 0.10653, abs=1e-6)
    assert float(result.coefficients[0, 1]) == pytest.approx(0.03935, abs=5e-6)


def test_k3_is_finite_far_away_and_its_gradient_stops():
    x = torch.tensor([99.0], dtype=torch.float32, requires_grad=True)
    value = divergences.k3(x)
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(485165174.4, rel=1e-6)
    assert x.grad is not None
    assert float(x.grad) == 0.0


def test_expected_gradients_of_the_estimators():
    """p = softmax(θ, 0) = (.5, .5), reference (.8, .2): k2's expected gradient is the KL's; k3's is not."""
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logp = torch.nn.functional.logsigmoid(torch.stack([theta, -theta]))
    d = torch.tensor([0.8, 0.2], dtype=torch.float64).log() - logp

    def expected(estimate):
        return float(torch.autograd.grad((0.5 * estimate(d)).sum(), theta, retain_graph=True)[0])

    assert expected(divergences.k2) == pytest.approx(-0.34657, abs=5e-6)
    assert expected(divergences.k3) == pytest.approx(-0.30, abs=1e-9)
    assert expected(lambda x: -x) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(InputError, match="k1"):
        S.KLToReference(estimator="k1")


def test_kl_stands_in_the_loss_once_and_not_in_the_reward():
    rollouts, policy = batch([[-1.0]], [1.0], ref=[[-1.0 + math.log(0.5)]])
    a = plain(regularizers=(S.KLToReference(beta=0.1),))
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.advantages[0, 1]) == 1.0
    kl = math.log(2) + 0.5 - 1
    assert float(result.loss.detach()) == pytest.approx(-1.0 + 0.1 * kl, abs=1e-12)


def test_the_kl_metric_follows_the_losss_rule():
    def ref(kls):  # d with e^d − 1 − d = kl, d < 0, by Newton
        out = []
        for kl in kls:
            d = -math.sqrt(2 * kl)
            for _ in range(60):
                d -= (math.exp(d) - 1 - d - kl) / (math.exp(d) - 1)
            out.append(d - 1.0)
        return out

    rollouts, policy = batch([[-1.0], [-1.0] * 3], [0.0, 0.0], ref=[ref([0.4]), ref([0.1] * 3)])
    for aggregate, right in ((S.TokenMean(), 0.175), (S.SequenceMean(), 0.25)):
        a = plain(regularizers=(S.KLToReference(beta=1.0),), aggregate=aggregate)
        assert kenpo.evaluate(a, rollouts, policy).metrics["kl_to_reference"] == pytest.approx(right, abs=1e-9)


def test_entropy_bonus_covers_all_trained_tokens():
    rollouts, policy = batch([[-1.0, -1.0]], [0.0])
    policy = policy.replace(entropy=torch.tensor([[0.0, 0.2, 1.0]], dtype=torch.float64))
    result = kenpo.evaluate(plain(regularizers=(S.EntropyBonus(coef=0.1),)), rollouts, policy)
    assert float(result.loss.detach()) == pytest.approx(-0.06, abs=1e-12)
    assert result.gradients["entropy"][0, 1:].tolist() == pytest.approx([-0.05, -0.05])
