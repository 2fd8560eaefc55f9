"""Variation of algorithms: settings by dotted key, differences, added stages, and what is refused."""

from __future__ import annotations

import pytest

import kenpo
from kenpo import stages as S
from kenpo.errors import IllegalCombinationError, InputError, UnknownNameError

GRPO, GSPO, DAPO = (kenpo.get(n) for n in ("grpo", "gspo", "dapo"))


def test_a_setting_changes_one_number():
    a = GRPO.with_settings({"surrogate.high": 0.3})
    assert GRPO.diff(a) == {"surrogate.high": (0.2, 0.3)}
    assert a.but(surrogate=S.Clip(0.2, 0.2)).diff(GRPO) == {}


def test_settings_reach_tuple_slots_and_nested_stages():
    a = GRPO.with_settings({"regularizers.kl_to_reference.beta": 0.1})
    assert a.regularizers == (S.KLToReference(beta=0.1),)
    b = GSPO.but(ratio=S.SequenceRatio(bound=S.LogClip())).with_settings({"ratio.bound.low": 0.2})
    assert b.ratio.bound == S.LogClip(0.2, 0.4)
    assert GRPO.with_settings({"regularizers": []}).needs == {"logp_old"}


def test_settings_are_applied_together():
    a = DAPO.with_settings({"shaping.soft_overlong.limit": 20, "shaping.soft_overlong.buffer": 4})
    assert a.shaping == (S.SoftOverlong(20, 4),)
    with pytest.raises(InputError, match="buffer 4096 exceeds limit 20"):
        DAPO.with_settings({"shaping.soft_overlong.limit": 20})


@pytest.mark.parametrize(
    ("key", "value", "error", "says"),
    [
        ("surrogate.hgih", 0.3, UnknownNameError, "surrogate.high"),
        ("surogate.high", 0.3, UnknownNameError, "surrogate.high"),
        ("surrogate.high", "wide", InputError, r"setting surrogate\.high: clip\.high: 'wide' is not a number"),
        ("surrogate.high", True, InputError, "True is not a number"),
        ("surrogate.high", float("nan"), InputError, "nan is not a number"),
        ("surrogate.high", -0.1, InputError, "distances"),
        ("advantage.ddof", 2, InputError, "ddof"),
        ("aggregate.over", "some", InputError, "'some' is not 'all' or 'kept'"),
        ("regularizers", [1], InputError, "emptied"),
        ("advantage", None, UnknownNameError, "advantage"),
    ],
)
def test_a_bad_setting_is_refused(key, value, error, says):
    with pytest.raises(error, match=says):
        GRPO.with_settings({key: value})


def test_a_setting_without_effect_is_refused():
    with pytest.raises(InputError, match="no effect"):
        GRPO.with_settings({"regularizers": [], "regularizers.kl_to_reference.beta": 0.1})


def test_diff_names_stages_where_classes_differ():
    found = GRPO.diff(GSPO)
    assert set(found) == {"ratio", "surrogate.low", "surrogate.high", "regularizers.kl_to_reference"}
    assert found["surrogate.low"] == (0.2, 3e-4)
    assert found["regularizers.kl_to_reference"] == (S.KLToReference(), None)


def test_adding_a_stage_by_name():
    a = DAPO.adding("untruncated").with_settings({"aggregate.over": "kept"})
    assert a.weights == (S.Untruncated(),)
    assert a.needs == {"logp_old", "truncated"}
    with pytest.raises(UnknownNameError, match="untruncated"):
        DAPO.adding("untruncate")
    with pytest.raises(IllegalCombinationError, match="twice"):
        a.adding("untruncated")


def test_slots_take_only_their_kind():
    with pytest.raises(InputError, match="surrogate takes Surrogate"):
        GRPO.but(surrogate=S.TokenRatio())
    with pytest.raises(InputError, match="no slot"):
        GRPO.but(clip=S.Clip())
    with pytest.raises(IllegalCombinationError, match="ratio slot is empty"):
        GRPO.but(ratio=None)
    with pytest.raises(IllegalCombinationError, match="takes no ratio"):
        GRPO.but(surrogate=S.ScoreFunction())


def test_dapo_with_the_sequence_ratio_is_a_combination_of_its_own():
    """DAPO's sampling, advantage and token mean with GSPO's ratio and band: the first combination people ask for."""
    mixed = DAPO.but(name="dapo-gspo", ratio=GSPO.ratio, surrogate=GSPO.surrogate)
    assert set(DAPO.diff(mixed)) == {"ratio", "surrogate.low", "surrogate.high"}
    assert set(GSPO.diff(mixed)) == {"selection.drop_uniform_groups", "shaping.soft_overlong", "aggregate"}


def test_a_stage_may_read_only_what_it_declares():
    class Peeks(S.Clip):
        def __call__(self, ratio, ctx):
            ctx.read("logp_ref")
            return super().__call__(ratio, ctx)

    from faults.build import batch

    rollouts, policy = batch([[-1.0]], [1.0], ref=[[-1.0]])
    with pytest.raises(kenpo.errors.UndeclaredFieldError, match=r"Peeks reads 'logp_ref'"):
        kenpo.evaluate(GRPO.but(surrogate=Peeks()), rollouts, policy)


def test_a_missing_field_names_the_stage_and_the_mend():
    from faults.build import batch

    rollouts, policy = batch([[-1.0]], [1.0])
    with pytest.raises(kenpo.errors.MissingFieldError, match=r"KLToReference needs 'logp_ref'.*reference model"):
        kenpo.evaluate(GRPO, rollouts, policy)


def test_an_unset_length_is_refused_when_the_loss_is_evaluated():
    from faults.build import batch

    rollouts, policy = batch([[-1.0]], [1.0])
    with pytest.raises(InputError, match=r"aggregate\.length"):
        kenpo.evaluate(kenpo.get("dr_grpo"), rollouts, policy)


def test_unknown_algorithm_lists_close_matches():
    with pytest.raises(UnknownNameError, match=r"did you mean.*gspo"):
        kenpo.get("gsppo")


def test_an_algorithm_from_a_file(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("import kenpo\nMINE = kenpo.get('grpo').but(name='mine', regularizers=())\n")
    assert kenpo.load(f"{file}:MINE").name == "mine"
    with pytest.raises(UnknownNameError, match="MINE"):
        kenpo.load(f"{file}:MIN")
    with pytest.raises(InputError, match="does not exist"):
        kenpo.load(f"{tmp_path}/none.py:MINE")
    file.write_text("raise RuntimeError('boom')")
    with pytest.raises(InputError, match="RuntimeError: boom"):
        kenpo.load(f"{file}:MINE")
