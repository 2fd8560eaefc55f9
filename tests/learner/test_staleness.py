"""Ages of rows in optimizer updates, and which leave."""

import pytest
import torch

import kenpo
from kenpo.learner.staleness import age_figures, ages, all_fresh, fresh_enough, gap_of_the_fresh, oldest


def rows(**more):
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 0]]).bool()
    version = torch.tensor([[-1, 3, 7], [-1, 7, 7], [-1, -1, -1]])
    return kenpo.Rollouts(
        mask=mask, group=torch.tensor([0, 0, 1]), rewards=torch.tensor([1.0, 0, 0]), policy_version=version, **more
    )


def test_ages_count_updates():
    assert ages(rows(), 8).tolist() == [[0, 5, 1], [0, 1, 1], [0, 0, 0]]
    assert oldest(rows(), 8).tolist() == [5, 1, 0]
    assert age_figures(rows(), 8) == {"staleness": (8.0, 5.0)}
    assert ages(rows().replace(policy_version=None), 8) is None
    assert age_figures(rows().replace(policy_version=None), 8) == {}


def test_only_rows_above_the_limit_leave():
    for most, kept in ((5, 3), (4, 2), (1, 2), (0, 1), (None, 3)):
        left, dropped = fresh_enough(rows(), 8, most)
        assert (len(left), dropped) == (kept, 3 - kept)
    assert fresh_enough(rows(), 8, 4)[0].group.tolist() == [0, 1]


def test_the_gap_is_that_of_the_same_weights():
    old = torch.tensor([[0.0, -1, -1], [0, -1, -1], [0, -1, 0]])
    batch = rows(logp_old=old, logp_sampler=old + torch.tensor([[0, 9.0, 0.25], [0, 0.125, 0], [0, 0, 0]]))
    assert gap_of_the_fresh(batch, 7) == pytest.approx(0.25)
    assert not all_fresh(batch, 7)
    assert all_fresh(batch[[1, 2]], 7)
    assert gap_of_the_fresh(batch[[0]], 9) is None
