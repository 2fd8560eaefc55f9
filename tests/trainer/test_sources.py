"""What the trainer asks of a source: priorities, refilling, a greedy baseline, and state that is saved."""

import math

import pytest
import torch

from kenpo.errors import InputError
from kenpo.experience.draw import draw_prioritised

from .stubs import Task
from .test_collect import Asked


def test_problems_are_drawn_by_weight():
    """Weights 3 : 1 : 0 over 4000 draws of the first place; the weightless one never comes."""
    first = [draw_prioritised([10, 11, 12], {10: 3.0, 11: 1.0, 12: 0.0}, seed)[0] for seed in range(4000)]
    assert first.count(10) / 4000 == pytest.approx(0.75, abs=0.03)
    assert 12 not in draw_prioritised([10, 11, 12], {10: 3.0, 11: 1.0, 12: 0.0}, 0)
    assert sorted(draw_prioritised([10, 11, 12], {}, 5)) == [10, 11, 12]


def test_a_problem_without_a_weight_has_the_mean():
    first = [draw_prioritised([1, 2, 3], {1: 1.0, 2: 5.0}, seed)[0] for seed in range(4000)]
    assert first.count(3) / 4000 == pytest.approx(3 / 9, abs=0.03)


@pytest.mark.parametrize("weights", [{1: -1.0}, {1: math.nan}, {1: 0.0, 2: 0.0}])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(InputError, match="priorit"):
        draw_prioritised([1, 2], weights, 0)


def test_priorities_choose_the_problems_and_leave_the_cursor():
    c = Asked(lambda answer, i: float(i % 2), algorithm="grpo", task=Task(size=50), prompts=5)
    weights = {i: float(i in (3, 4, 5, 6, 7)) for i in range(50)}
    got = c.collect(1, 9, weights)
    assert sorted(set(got.rollouts.prompt_id.tolist())) == [3, 4, 5, 6, 7]
    assert got.state == {"cursor": 9}
    again = Asked(lambda answer, i: float(i % 2), algorithm="grpo", task=Task(size=50), prompts=5).collect(
        1, 9, weights
    )
    assert torch.equal(got.rollouts.prompt_id, again.rollouts.prompt_id)


def test_an_endless_task_is_drawn_from_its_first_problems():
    weights = {n: float(n in (5, 511)) for n in range(512)} | {700: 1e9}
    got = Asked(lambda answer, i: float(i % 2), algorithm="grpo", prompts=2).collect(1, 0, weights)
    assert sorted(set(got.rollouts.prompt_id.tolist())) == [5, 511]


def test_the_same_problem_may_be_sampled_again():
    """Problem 2 gives no usable group at first: it is sampled again with other seeds, and no new problem is taken."""
    calls = {2: 0}

    def reward(answer, i):
        if answer == 2:
            calls[2] += 1
            return 1.0 if calls[2] <= 2 else float(i % 2)
        return float(i % 2)

    c = Asked(reward, prompts=4, refill="same")
    got = c.collect(1, 0)
    assert sorted(set(got.rollouts.prompt_id.tolist())) == [0, 1, 2, 3]
    assert got.state == {"cursor": 4}
    assert got.figures["rounds"] == 2
    assert len(set(c.engine.seeds)) == len(c.engine.seeds) == 10


def test_a_greedy_baseline_is_asked_for_in_the_same_call_and_is_no_row():
    """Samples of a prompt earn 0 and 1 by their number, its greedy response (the third asked) the problem's number."""
    c = Asked(
        lambda answer, i: float(answer) if i % 3 == 2 else float(i % 3), algorithm="grpo", prompts=3, baseline=True
    )
    got = c.collect(1, 4)
    assert c.engine.calls == 1
    assert [r.greedy for r in c.engine.requests] == [False, False, True] * 3
    assert got.rollouts.baseline.tolist() == [4, 4, 5, 5, 6, 6]
    assert got.rollouts.rewards.tolist() == [0, 1] * 3
    assert got.figures["reward"] == {"sum": 3.0, "count": 6}
    assert len(got.records) == 9


def test_without_a_verdict_on_the_baseline_the_samples_have_none():
    c = Asked(lambda answer, i: math.nan if i == 2 else float(i % 3), algorithm="grpo", prompts=2, baseline=True)
    assert c.collect(1, 0).rollouts.rewards.isnan().tolist() == [True, True, False, False]
