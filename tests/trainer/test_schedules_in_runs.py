"""Numbers of an algorithm that move along a run: in force, recorded, resumed, refused."""

import pytest
import torch

from kenpo.cli import main
from kenpo.commands.training import read_config
from kenpo.errors import InputError, UnknownNameError
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

from .test_resume import metrics, same_end, stop_after
from .test_teachers import weights


@pytest.fixture
def moving(options):
    return options | {
        "algorithm": "pmpo-half", "settings": {}, "schedule": "ratio.p=1:0.2@2", "eval_problems": 0, "minibatches": 2,
        "lr": 1e-2, "steps": 4,
    }  # fmt: skip


def test_the_number_in_force_is_recorded_and_has_an_effect(moving, tmp_path):
    """Until it moves the run is that of its first value; afterwards it is another one."""
    train(TrainConfig(**moving, out=str(tmp_path / "a")))
    train(TrainConfig(**(moving | {"schedule": "constant", "settings": {"ratio.p": 1.0}}), out=str(tmp_path / "b")))
    ours, fixed = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert [line["schedule/ratio.p"] for line in ours] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert "schedule/ratio.p" not in fixed[0]
    assert ours[0]["grad_norm"] == fixed[0]["grad_norm"]
    assert ours[1]["grad_norm"] != fixed[1]["grad_norm"]
    one, two = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert any(not torch.equal(one[n], two[n]) for n in one)


def test_it_goes_on_where_it_was(moving, tmp_path):
    train(TrainConfig(**moving, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**moving, out=str(tmp_path / "b")), stop_after(2, fall))
    train(TrainConfig(**moving, out=str(tmp_path / "b"), resume=True))
    same_end(tmp_path / "b", tmp_path / "a")


def test_a_course_and_moving_numbers_stand_beside_each_other(options, capsys):
    config = read_config(["--schedule", "cosine", "ratio.p=1:0.5@20"])
    assert config.course == "cosine"
    assert [str(s) for s in config.moving] == ["ratio.p=1:0.5@20"]
    assert read_config([]).course == "constant"
    args = ["--model", options["model"], "--algorithm", "pmpo-half", "--schedule", "linear", "ratio.p=1:0.5@20"]
    assert main(["train", *args, "--dry-run", "--threads", "1"]) == 0
    assert "ratio.p moves from 1 to 0.5 over 20 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "error", "what"),
    [
        ("up", UnknownNameError, "unknown schedule 'up'"),
        (("linear", "cosine"), InputError, "takes one course"),
        ("ratio.p=1:0", InputError, "expected KEY=FROM:TO@STEPS"),
        ("ratio.q=1:0@2", InputError, "ratio.q"),
        (("ratio.p=1:0.5@2", "ratio.p=1:0.2@2"), InputError, "given twice"),
    ],
)
def test_what_can_not_move_is_refused(schedule, error, what, moving, tmp_path):
    with pytest.raises(error, match=what):
        train(TrainConfig(**(moving | {"schedule": schedule}), out=str(tmp_path / "x")))
    assert not (tmp_path / "x").exists()
