"""Faults of other trainers in groups and advantages: the right values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import kenpo
from faults.build import advantages, batch, plain
from kenpo import errors
from kenpo import stages as S
from kenpo.ops import returns

GOLDEN = Path(__file__).parent.parent / "golden"

Z = plain(advantage=S.GroupZScore(eps=0.0))


def near(values, right, tolerance=5e-5):
    return values == pytest.approx(right, abs=tolerance)


def test_leave_one_out_has_one_rule_for_a_group_of_one():
    a = plain(advantage=S.LeaveOneOut(), ratio=None, surrogate=S.ScoreFunction())
    assert near(advantages(a, [0.4, 1, 0, 0], [0, 1, 1, 1]), [0.0, 1.0, -0.5, -0.5])


def test_whitening_over_the_batch_with_single_rollouts():
    a = plain(advantage=S.GlobalWhiten())
    assert near(advantages(a, [1, 0, 0, 1], [0, 1, 2, 3]), [0.866, -0.866, -0.866, 0.866])


def test_a_mixed_group_is_kept_whole():
    rollouts, _ = batch([[-1.0]] * 5, [0, 1, 1, 1, 1])
    assert kenpo.select(kenpo.get("dapo"), rollouts).all()


def test_a_uniform_group_and_a_group_of_one_are_dropped():
    rollouts, _ = batch([[-1.0]] * 4, [1, 1, 0.1, 0.1], [0, 0, 1, 2])
    assert not kenpo.select(kenpo.get("dapo"), rollouts).any()


def test_no_floor_under_the_variance():
    a = plain(advantage=S.GroupZScore())
    assert near(advantages(a, [0.50000, 0.50002], [0, 0]), [-0.6604, 0.6604])


def test_a_rollout_without_a_verdict_moves_nobody():
    assert near(advantages(Z, [None, 1.0, 0.6, 0.8], [0] * 4), [0.0, 1.0, -1.0, 0.0])


def test_a_rollout_without_a_verdict_is_no_failure():
    rollouts, _ = batch([[-1.0]] * 4, [1, None, None, 0])
    prepared = kenpo.prepare(plain(), rollouts)
    assert prepared.selected.tolist() == [True, False, False, True]
    assert float(prepared.shaped[prepared.selected].mean()) == 0.5
    assert int(kenpo.weigh(plain(), prepared).totals.sequences) == 2


def test_every_rollout_enters_the_groups_statistics():
    assert near(advantages(Z, [1, 0, 0, 0], [0] * 4), [1.5, -0.5, -0.5, -0.5])


def test_groups_are_ids_not_prompts():
    h = 1 / math.sqrt(2)
    assert near(advantages(Z, [1, 0, 1, 1], [0, 0, 1, 1]), [h, -h, 0, 0])


def test_advantages_follow_their_rows():
    order = [2, 0, 3, 1]
    rewards, group = [1.0, 0.0, 5.0, 1.0], [0, 0, 1, 1]
    plainly = advantages(Z, rewards, group)
    moved = advantages(Z, [rewards[i] for i in order], [group[i] for i in order])
    assert moved == pytest.approx([plainly[i] for i in order], abs=1e-12)


def test_masked_advantages_and_padding_are_not_averaged():
    rollouts, policy = batch([[-1.0] * 4], [2.0], masks=[[1, 1, 1, 0]])
    a = plain(ratio=S.SequenceRatio(), aggregate=S.SequenceMean())
    assert float(kenpo.evaluate(a, rollouts, policy).loss.detach()) == pytest.approx(-2.0, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_normalising_selects_instead_of_multiplying(bad):
    rollouts, policy = batch([[-1.0]] * 3, [2.0, 0.0, 4.0], masks=[[1], [0], [1]])
    policy.logp[1, 1] = bad
    result = kenpo.evaluate(plain(advantage=S.GlobalWhiten(eps=0.0)), rollouts, policy)
    assert near(result.advantages[:, 1].tolist(), [-0.7071, 0.0, 0.7071])


def test_a_reward_does_not_depend_on_later_token_masks():
    """Our rule: outcomes are per rollout; a weight that rejects a token changes its gradient, not the group's
    baseline."""
    rollouts, policy = batch([[-1.0, -1.0]] * 2, [2.0, 0.0], truncated=torch.tensor([True, False]))
    a = Z.but(weights=(S.Untruncated(),))
    assert near(kenpo.evaluate(a, rollouts, policy).advantages[:, 1].tolist(), [0.7071, -0.7071])


def test_uniform_outcomes_give_exactly_zero():
    for a in (Z, plain(advantage=S.GroupCentred()), plain(advantage=S.GlobalWhiten())):
        assert advantages(a, [0.1] * 7, [0] * 7) == [0.0] * 7


def test_scaling_by_the_batch_uses_the_batch():
    a = plain(advantage=S.BatchScaled(eps=0.0))
    assert near(advantages(a, [0, 1, 0, 10], [0, 0, 1, 1]), [-0.1030, 0.1030, -1.0296, 1.0296])


PARTS = plain(advantage=S.PartsZScore(("r1", "r2"), (1.0, 0.5), eps=0.0),
              selection=(S.DropUniformGroups(by="parts", parts=("r2", "r1")),))  # fmt: skip


def judged(a, *parts, group=None):
    """Advantages and what is kept, of rollouts whose outcome is the sum of named parts."""
    named = {f"r{k + 1}": torch.tensor(p, dtype=torch.float64) for k, p in enumerate(parts)}
    n = len(parts[0])
    rollouts, policy = batch([[-1.0]] * n, sum(named.values()).tolist(), group, reward_parts=named)
    return kenpo.evaluate(a, rollouts, policy).advantages[:, 1].tolist(), kenpo.select(a, rollouts).tolist()


def test_a_group_whose_parts_differ_is_kept_though_its_sum_does_not():
    values, kept = judged(PARTS, [1.0, 0.0], [0.0, 1.0])
    assert near(values, [0.3536, -0.3536])
    assert kept == [True, True]
    even = PARTS.with_settings({"advantage.weights": [1.0, 1.0]})
    assert judged(even, [1.0, 0.0], [0.0, 1.0]) == ([0.0, 0.0], [True, True])


def test_a_group_whose_parts_are_all_uniform_is_dropped_whole():
    _, kept = judged(PARTS, [1.0, 1, 1, 0], [0.5, 0.5, 0, 1], group=[0, 0, 1, 1])
    assert kept == [False, False, True, True]


def test_the_plain_sum_is_no_test_of_parts():
    with pytest.raises(errors.IllegalCombinationError, match="by='parts'"):
        PARTS.but(selection=(S.DropUniformGroups(),))
    with pytest.raises(errors.IllegalCombinationError, match="by='outcome'"):
        plain(selection=(S.DropUniformGroups(by="parts"),), advantage=S.GroupZScore())
    with pytest.raises(errors.IllegalCombinationError, match="as a part"):
        PARTS.but(shaping=(S.SoftOverlong(limit=20, buffer=5),))


def test_a_part_without_a_verdict_moves_nobody_else():
    nan = float("nan")
    values, kept = judged(PARTS.but(selection=()), [1.0, 0.0, nan], [1.0, 1.0, 1.0])
    assert not any(kept[2:])
    assert near(values, [0.7071, -0.7071, 0.0])
    rollouts, policy = batch([[-1.0]] * 3, [1, 0, 1], reward_parts={
        "r1": torch.tensor([1.0, 0.0, nan]), "r2": torch.tensor([0.0, 0.0, 2.0])})  # fmt: skip
    got = kenpo.evaluate(PARTS, rollouts, policy).advantages[:, 1].tolist()
    z = [-1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]
    assert near(got, [0.7071 + z[0] / 2, -0.7071 + z[1] / 2, z[2] / 2])


def test_bad_parts_are_named():
    rollouts, policy = batch([[-1.0]] * 2, [1, 0])
    with pytest.raises(errors.MissingFieldError, match="reward_parts"):
        kenpo.evaluate(PARTS.but(selection=()), rollouts, policy)
    with pytest.raises(errors.MissingFieldError, match="reward_parts"):
        kenpo.select(PARTS, rollouts)
    for a in (PARTS, PARTS.but(selection=())):
        with pytest.raises(errors.UnknownNameError, match=r"r2.*did you mean r1"):
            judged(a, [1.0, 0.0])
    with pytest.raises(errors.IllegalCombinationError, match="tests other parts"):
        PARTS.but(selection=(S.DropUniformGroups(by="parts"),))
    rollouts, _ = batch([[-1.0]] * 2, [1, 0], reward_parts={"r1": torch.tensor([float("inf"), 0.0])})
    with pytest.raises(errors.NonFiniteError, match="r1"):
        kenpo.prepare(plain(advantage=S.PartsZScore()), rollouts)
    for bad in ({"parts": ("a", "a")}, {"weights": (1.0,)}, {"parts": ("a",), "weights": ("b",)}, {"parts": (1,)},
                {"eps": -1.0}, {"ddof": 2},
                {"parts": ("a",), "weights": (10**400,)}, {"parts": ("a",), "weights": (float("inf"),)}):  # fmt: skip
        with pytest.raises(errors.InputError, match="parts_z_score"):
            S.PartsZScore(**bad)


def test_a_token_reward_at_a_rejected_position_does_not_count():
    """The rule where an outcome is a sum of token rewards: what the mask has taken out pays nothing."""
    mask = torch.tensor([[1, 0], [1, 1]]).bool()
    score = returns.return_to_go(torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64), mask)[:, 0]
    assert score.tolist() == [0.0, 0.0]
    assert advantages(Z, score.tolist(), [0, 0]) == [0.0, 0.0]


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_values_at_masked_positions_do_not_bootstrap():
    mask = row(1, 1, 0).bool()
    found = returns.gae(row(0, 2, 0), row(0, 0, 50), mask, gamma=1.0, lam=0.5)
    assert found.tolist() == [[1.0, 2.0, 0.0]]


def test_a_return_runs_across_tool_tokens_and_stops_at_padding():
    found = returns.return_to_go(row(0, 0, 2, 7), row(1, 0, 1, 0).bool())
    assert found.tolist() == [[2.0, 0.0, 2.0, 0.0]]


def test_the_kl_of_tool_tokens_enters_no_return():
    mask = row(1, 0, 1).bool()
    rewards = returns.at_last_token(torch.tensor([1.0], dtype=torch.float64), mask) - 0.1 * row(0.2, 5.0, 0.1)
    assert returns.return_to_go(rewards, mask)[0, 0].item() == pytest.approx(0.97)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_score_stands_on_the_last_sampled_token(padding):
    mask = row(*[1, 1, 1], *[0] * padding).bool()
    found = returns.at_last_token(torch.tensor([1.0], dtype=torch.float64), mask)
    assert found.tolist() == [[0.0, 0.0, 1.0, *[0.0] * padding]]


@pytest.mark.parametrize("case", json.loads((GOLDEN / "gae.json").read_text()), ids=lambda c: c["name"])
def test_generalised_advantages(case):
    i = case["inputs"]
    tensors = (torch.tensor(i[n], dtype=torch.float64) for n in ("token_rewards", "values"))
    found = returns.gae(*tensors, torch.tensor(i["mask"]).bool(), gamma=i["gamma"], lam=i["lambda"])
    assert torch.allclose(found, torch.tensor(case["expect"]["advantages"], dtype=torch.float64), rtol=1e-9, atol=1e-12)


# -- rewards of any size ---------------------------------------------------------------------------------------------

SPREADS = [
    S.GroupZScore(), S.GroupZScore(inside=True), S.GroupZScore(ddof=0), S.BatchScaled(), S.GlobalWhiten(),
    S.GroupCentred(), S.LeaveOneOut(),
]  # fmt: skip


@pytest.mark.parametrize("stage", SPREADS, ids=repr)
@pytest.mark.parametrize("size", [1e12, 1e30])
def test_large_rewards_do_not_lose_their_advantage(stage, size):
    """In float32 the square of 1e30 overflows, and a standard deviation of infinity made every advantage 0."""
    usual, large = (
        kenpo.prepare(plain(advantage=stage), _two_groups(scale, dtype)).advantages
        for scale, dtype in ((size, torch.float64), (size, torch.float32))
    )
    assert bool(large[:, 1].all())
    assert torch.allclose(large.double(), usual, rtol=1e-6)


@pytest.mark.parametrize("stage", [s for s in SPREADS if not isinstance(s, S.GlobalWhiten)], ids=repr)
def test_rewards_that_overflow_are_named(stage):
    with pytest.raises(errors.NonFiniteError, match=r"its reward is .*scale the rewards down"):
        kenpo.prepare(plain(advantage=stage), _two_groups(3e38, torch.float32))


def _two_groups(scale, dtype):
    return kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * 6),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        rewards=torch.tensor([1.0, 0.9, -0.5, 1.0, 0.8, 1.0], dtype=dtype) * scale,
    )


def test_a_truncated_response_leaves_the_statistics_where_that_is_asked_for():
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * 3),
        group=torch.zeros(3, dtype=torch.long),
        rewards=torch.tensor([2.0, 50.0, 4.0]),
        truncated=torch.tensor([False, True, False]),
    )
    a = plain(advantage=S.GroupCentred())
    masked = kenpo.prepare(a.adding("untruncated"), rollouts)
    assert masked.advantages[:, 1].tolist() == pytest.approx([2 - 56 / 3, 50 - 56 / 3, 4 - 56 / 3])
    dropped = kenpo.prepare(a.adding("drop_truncated"), rollouts)
    assert dropped.advantages[:, 1].tolist() == [-1.0, 0.0, 1.0]
    assert dropped.selected.tolist() == [True, False, True]
