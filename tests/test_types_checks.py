"""What Rollouts refuse, and that rows stay together."""

from __future__ import annotations

import pytest
import torch

from kenpo.errors import InputError
from kenpo.types import Rollouts


def small(**changes) -> Rollouts:
    fields = {
        "mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
        "group": torch.tensor([0, 0]),
        "rewards": torch.tensor([1.0, 0.0]),
        "reward_parts": {"format": torch.tensor([0.5, 0.25])},
    }
    return Rollouts(**{**fields, **changes})


def test_a_trainable_first_position_is_refused():
    with pytest.raises(InputError, match="position 0"):
        small(mask=torch.tensor([[1, 1, 1], [0, 1, 0]]))


def test_a_mask_with_other_values_is_refused():
    with pytest.raises(InputError, match="other than 0 and 1"):
        small(mask=torch.tensor([[0, 1, 2], [0, 1, 0]]))


def test_rows_keep_everything_together():
    both = small(logp_old=torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, 0.0]]))
    swapped = both[[1, 0]]
    assert swapped.rewards.tolist() == [0.0, 1.0]
    assert swapped.logp_old[0].tolist() == [0.0, -3.0, 0.0]
    assert swapped.reward_parts["format"].tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("rewards", torch.zeros(3), "rewards"),
        ("logp_old", torch.zeros(2, 4), "logp_old"),
        ("logp_old", torch.zeros(2), "axes"),
        ("group", torch.zeros(2), "integers"),
    ],
)
def test_a_field_of_the_wrong_shape_or_kind_is_named(field, value, word):
    with pytest.raises(InputError, match=word):
        small(**{field: value})
