"""State of algorithms and sources, taken apart into JSON and tensors and put together again."""

import json
import math

import pytest
import torch

from kenpo.errors import InputError
from kenpo.nested import join, split


def test_what_was_taken_apart_comes_back():
    state = {"a": [1, 2.5, None, "x"], "t": torch.arange(3), "deep": {"u": [torch.ones(2, 2), {"v": torch.zeros(0)}]}}
    plain, tensors = split(state, "s")
    assert sorted(tensors) == ["s.deep.u.0", "s.deep.u.1.v", "s.t"]
    back = join(json.loads(json.dumps(plain)), tensors)
    assert back["a"] == state["a"]
    assert torch.equal(back["t"], state["t"])
    assert torch.equal(back["deep"]["u"][0], state["deep"]["u"][0])
    assert back["deep"]["u"][1]["v"].shape == (0,)
    back["t"][0] = 9
    assert tensors["s.t"][0] == 0


@pytest.mark.parametrize("bad", [{1: 2}, {"$tensor": 1}, {"a": object()}, [{"b": {1, 2}}]])
def test_what_cannot_be_saved_is_refused(bad):
    with pytest.raises(InputError, match="can't be saved"):
        split(bad, "s")


def test_a_missing_tensor_is_an_error():
    with pytest.raises(KeyError):
        join({"$tensor": "gone"}, {})


PLACES = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "a~1b": torch.tensor(3), "a~0": {"1b": torch.tensor(4)}}


def test_no_two_places_share_a_name():
    plain, tensors = split(PLACES, "s")
    assert len(tensors) == 4
    back = join(json.loads(json.dumps(plain)), tensors)
    assert [int(back["a"]["b"]), int(back["a.b"]), int(back["a~1b"]), int(back["a~0"]["1b"])] == [1, 2, 3, 4]


def test_what_is_kept_is_a_copy():
    live = torch.ones(2)
    _plain, tensors = split({"x": live}, "s")
    live.zero_()
    assert tensors["s.x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_no_json_are_refused(value):
    with pytest.raises(InputError, match=r"state s\.a\.0: .* is no JSON number"):
        split({"a": [value]}, "s")
