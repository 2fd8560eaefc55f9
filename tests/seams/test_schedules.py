"""A number that changes along a run: what is in force at a step, and what is refused before the run starts."""

from __future__ import annotations

import pytest

import kenpo
from kenpo import schedules
from kenpo.errors import InputError, UnknownNameError


def test_a_schedule_is_linear_and_stays_at_its_end():
    plan = [schedules.parse("ratio.p=1:0@200"), schedules.parse("aggregate.length=100:100@1")][:1]
    a = kenpo.get("pmpo-half")
    found = [schedules.at_step(a, plan, step).ratio.p for step in (0, 50, 199, 200, 5000)]
    assert found == [1.0, 0.75, pytest.approx(0.005), 0.0, 0.0]
    assert a == kenpo.get("pmpo-half")
    assert schedules.values(plan, 100) == {"ratio.p": 0.5}
    assert schedules.at_step(a, (), 3) is a


def test_several_numbers_move_together():
    plan = [schedules.parse("surrogate.low=0.2:0.1@10"), schedules.parse("surrogate.high=.2:.4@20")]
    a = kenpo.get("gspo")
    schedules.check(a, plan)
    half = schedules.at_step(a, plan, 10).surrogate
    assert (half.low, half.high) == (0.1, pytest.approx(0.3))
    assert str(plan[1]) == "surrogate.high=0.2:0.4@20"


def test_the_ends_are_exact():
    plan = schedules.parse("surrogate.low=0.1:0.3@3")
    assert plan.value(0) == 0.1
    assert plan.value(3) == 0.3


@pytest.mark.parametrize(
    "text", ["", "ratio.p", "ratio.p=1", "ratio.p=1:0", "ratio.p=1@3", "=1:0@3", "ratio.p=a:0@3", "ratio.p=1:0@2.5",
             "ratio.p=1:0@0", "ratio.p=nan:0@3", "ratio.p=1:inf@3"],
)  # fmt: skip
def test_malformed_schedules_are_refused(text):
    with pytest.raises(InputError, match="schedule"):
        schedules.parse(text)


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [
        ("gspo", "surrogate.lov=0:1@5", UnknownNameError, r"surrogate\.lov"),
        ("gspo", "surrogate.low=0.1:-1@5", InputError, "must|distances"),
        ("gspo", "advantage.ddof=0:1@5", InputError, "ddof.*not a whole number"),
        ("gspo", "advantage.inside=0:1@5", InputError, "inside.*not true or false"),
        ("dapo", "shaping.soft_overlong.buffer=10:20@5", InputError, "whole number"),
        ("reinforce_pp", "advantage.beta=0.1:0@5", InputError, "changes along the way"),
    ],
)
def test_what_no_stage_takes_is_refused_before_the_run(name, text, kind, words):
    with pytest.raises(kind, match=words):
        schedules.check(kenpo.get(name), [schedules.parse(text)])


def test_one_key_has_one_schedule():
    with pytest.raises(InputError, match=r"surrogate\.low.*twice"):
        schedules.check(kenpo.get("gspo"), [schedules.parse("surrogate.low=0:1@5")] * 2)
