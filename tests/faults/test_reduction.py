"""Faults of other trainers in loss reduction and gradient scale: the right values."""

from __future__ import annotations

import math

import pytest
import torch

import kenpo
from faults.build import batch, plain
from kenpo import stages as S
from kenpo.errors import InputError


def shares(a, rollouts, policy, pieces) -> list[float]:
    """The loss's shares of the given row sets of one minibatch."""
    prepared = kenpo.prepare(a, rollouts)
    b = kenpo.weigh(a, prepared)
    return [float(kenpo.objective(a, b[rows], policy[rows]).loss.detach()) for rows in pieces]


def on_policy(lengths, losses):
    """Rollouts of the given lengths whose token loss is `losses[i]` on policy (advantage = −loss)."""
    return batch([[-1.0] * n for n in lengths], [-x for x in losses])


def test_each_optimizer_step_divides_by_its_own_tokens():
    rollouts, policy = on_policy([1, 3, 2, 2], [0.6] * 4)
    a = plain()
    prepared = kenpo.prepare(a, rollouts)
    for rows in ([0, 1], [2, 3]):
        loss = kenpo.objective(a, kenpo.weigh(a, prepared[rows]), policy[rows]).loss
        assert float(loss.detach()) == pytest.approx(0.6, abs=1e-12)


def test_no_mean_of_micro_batch_means():
    rollouts, policy = on_policy([2, 6], [3.0, 1.0])
    for pieces in ([[0], [1]], [[0, 1]], [[1], [0]]):
        assert sum(shares(plain(), rollouts, policy, pieces)) == pytest.approx(1.5, abs=1e-12)


def test_no_sum_of_micro_batch_means():
    rollouts, policy = on_policy([1, 4], [2.0, 1.0])
    for pieces in ([[0], [1]], [[0, 1]]):
        assert sum(shares(plain(), rollouts, policy, pieces)) == pytest.approx(1.2, abs=1e-12)


def test_no_hidden_mean_per_sample():
    rollouts, policy = on_policy([1, 4], [4.0, 1.0])
    assert sum(shares(plain(), rollouts, policy, [[0], [1]])) == pytest.approx(1.6, abs=1e-12)


def test_shares_add_up_without_further_division():
    rollouts, policy = on_policy([2, 2, 2, 2], [1.0] * 4)
    parts = shares(plain(), rollouts, policy, [[0], [1], [2], [3]])
    assert parts == pytest.approx([0.25] * 4, abs=1e-12)
    assert sum(parts) == pytest.approx(1.0, abs=1e-12)


class MyClip(S.Clip):
    """A user's own surrogate, the same as the built-in."""


def test_a_surrogate_of_ones_own_has_the_same_scale():
    rollouts, policy = on_policy([4, 4], [0.5, 0.5])
    for surrogate in (S.Clip(), MyClip()):
        assert float(kenpo.evaluate(plain(surrogate=surrogate), rollouts, policy).loss.detach()) == pytest.approx(0.5)


def test_a_response_is_averaged_over_loss_tokens_not_its_width():
    mask = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    rollouts, policy = batch([[-1.0] * 10], [-0.5], masks=[mask])
    for aggregate in (S.TokenMean(), S.SequenceMean()):
        loss = kenpo.evaluate(plain(aggregate=aggregate), rollouts, policy).loss
        assert float(loss.detach()) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(("truncated", "right"), [([False, True], 1.0), ([True, True], 0.0)])
def test_truncated_responses_leave_numerator_and_denominator(truncated, right):
    rollouts, policy = batch([[-1.0] * 3, [-1.0] * 5], [-1.0, -1.0], truncated=torch.tensor(truncated))
    a = plain(weights=(S.Untruncated(),), aggregate=S.TokenMean(over="kept"))
    assert float(kenpo.evaluate(a, rollouts, policy).loss.detach()) == pytest.approx(right, abs=1e-12)


def test_sequence_losses_are_not_spread_by_length():
    rollouts, policy = batch([[-1.0], [-1.0] * 4], [1.0, -0.5])
    gspo = plain(ratio=S.SequenceRatio(), aggregate=S.SequenceMean())
    assert float(kenpo.evaluate(gspo, rollouts, policy).loss.detach()) == pytest.approx(-0.25, abs=1e-12)
    spread = gspo.but(aggregate=S.TokenMean())
    assert float(kenpo.evaluate(spread, rollouts, policy).loss.detach()) == pytest.approx(0.2, abs=1e-12)


def test_token_mean_is_not_zero_on_policy_and_sequence_mean_is():
    rollouts, policy = batch([[-1.0], [-1.0] * 3], [1.0, -1.0])
    assert float(kenpo.evaluate(plain(), rollouts, policy).loss.detach()) == pytest.approx(0.5, abs=1e-12)
    a = plain(aggregate=S.SequenceMean())
    assert float(kenpo.evaluate(a, rollouts, policy).loss.detach()) == pytest.approx(0.0, abs=1e-12)


def test_a_mask_of_other_numbers_is_refused():
    with pytest.raises(InputError, match="mask"):
        kenpo.Rollouts(mask=torch.tensor([[0.0, -0.5]]), group=torch.tensor([0]), rewards=torch.tensor([1.0]))
    rollouts, policy = batch([[-1.0] * 2] * 2, [1.0, -0.5])
    assert float(kenpo.evaluate(plain(), rollouts, policy).loss.detach()) == pytest.approx(-0.25, abs=1e-12)


def test_a_penalty_is_never_left_out():
    """A term that is declared has an effect, whatever path runs."""
    rollouts, policy = batch([[-1.0]], [1.0], ref=[[-1.5]])
    without = kenpo.evaluate(plain(), rollouts, policy).loss
    with_kl = kenpo.evaluate(plain(regularizers=(S.KLToReference(beta=0.1),)), rollouts, policy).loss
    assert float((with_kl - without).detach()) == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1), abs=1e-12)


def test_tokens_rejected_by_a_weight_stay_or_leave_by_name():
    rollouts, policy = batch([[-1.0] * 2, [-1.0] * 2], [-1.0, -1.0], truncated=torch.tensor([False, True]))
    for over, right in (("kept", 1.0), ("all", 0.5)):
        a = plain(weights=(S.Untruncated(),), aggregate=S.TokenMean(over=over))
        assert float(kenpo.evaluate(a, rollouts, policy).loss.detach()) == pytest.approx(right, abs=1e-12)


def test_a_dropped_sequence_trains_nothing():
    rollouts, policy = batch([[-1.0, -2.0]], [1.0], truncated=torch.tensor([True]))
    a = plain(ratio=S.SequenceRatio(), weights=(S.Untruncated(),), aggregate=S.SequenceMean())
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.loss.detach()) == 0.0
    assert not bool(result.coefficients.any())
