"""Runs that go on otherwise than they were started: more steps, other intervals, other numbers of processes; the best
checkpoint."""

import json
import os
import socket

import pytest
from safetensors.torch import load_file

from kenpo.errors import InputError
from kenpo.runs import checkpoint as checkpoints
from kenpo.runs.callbacks import Callback
from kenpo.trainer.config import TrainConfig, load
from kenpo.trainer.loop import Interrupted, train

from .test_resume import metrics, weights


def trained(line):
    """What a step says of training, without what is measured at intervals."""
    return {k: v for k, v in line.items() if not k.startswith("eval/")}


def go(options, run, **more):
    return train(TrainConfig(**{**options, **more, "out": str(run)}))


class Stop(Callback):
    def __init__(self, at):
        self.at = at

    def on_step(self, step, figures):
        if step == self.at:
            os.kill(os.getpid(), 15)


def test_more_steps_for_a_finished_run_make_the_longer_run(options, tmp_path, capsys):
    long, short = tmp_path / "long", tmp_path / "short"
    go(options, long, steps=5)
    go(options, short, steps=3)
    done = json.loads((short / "summary.json").read_text())
    assert go(options, short, steps=3, resume=True)["steps"] == done["steps"] == 3
    summary = go(options, short, steps=5, resume=True)
    assert summary["steps"] == 5
    assert summary["eval"]["before"] == done["eval"]["before"]
    assert list(map(trained, metrics(short)[1:])) == list(map(trained, metrics(long)[1:]))
    assert (short / "samples.jsonl").read_bytes() == (long / "samples.jsonl").read_bytes()
    ours, theirs = weights(short), weights(long)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert load(short / "config.json").steps == 5
    assert json.loads((short / "changes.jsonl").read_text()) == {"step": 3, "options": {"steps": [3, 5]}}
    with pytest.raises(InputError, match="it has done 5 steps already"):
        go(options, short, steps=4, resume=True)


def test_a_schedule_made_of_the_number_of_steps_refuses_others(options, tmp_path):
    go(options, tmp_path / "run", steps=2, schedule="linear")
    with pytest.raises(InputError, match="linear schedule made every rate so far from 2 steps"):
        go(options, tmp_path / "run", steps=4, schedule="linear", resume=True)
    for checkpoint in checkpoints.found(tmp_path / "run/checkpoints"):
        checkpoints.remove_tree(checkpoint)
    go(options, tmp_path / "constant", steps=2)
    for checkpoint in checkpoints.found(tmp_path / "constant/checkpoints"):
        checkpoints.remove_tree(checkpoint)
    with pytest.raises(InputError, match="no checkpoint left to go on from"):
        go(options, tmp_path / "constant", steps=4, resume=True)


def test_other_intervals_change_what_is_measured_and_saved_and_nothing_else(options, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(options, whole, keep=0)
    with pytest.raises(Interrupted):
        train(TrainConfig(**{**options, "keep": 0, "out": str(cut)}), [Stop(3)])
    go(options, cut, keep=0, resume=True, eval_every=1, checkpoint_every=5, log_samples=2)
    assert list(map(trained, metrics(cut))) == list(map(trained, metrics(whole)))
    evaluated = [line["step"] for line in metrics(cut) if "eval/accuracy" in line]
    assert evaluated == [0, 2, 4, 5, 6]
    assert [checkpoints.step_of(p) for p in checkpoints.found(cut / "checkpoints")] == [2, 3, 5, 6]
    ours, theirs = weights(cut), weights(whole)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    recorded = load(cut / "config.json")
    assert (recorded.eval_every, recorded.checkpoint_every, recorded.log_samples) == (1, 5, 2)
    told = json.loads((cut / "changes.jsonl").read_text())
    assert told == {"step": 3, "options": {"checkpoint_every": [2, 5], "eval_every": [2, 1], "log_samples": [256, 2]}}


def test_what_may_differ_and_is_not_given_stays_as_it_was_recorded(options, tmp_path):
    with pytest.raises(Interrupted):
        train(TrainConfig(**{**options, "out": str(tmp_path / "run")}), [Stop(1)])
    given = {n: v for n, v in options.items() if n not in ("steps", "eval_every", "checkpoint_every")}
    assert go(given, tmp_path / "run", resume=True)["steps"] == 6
    assert not (tmp_path / "run/changes.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forks of this one")
def test_a_run_goes_on_with_two_processes(options, tmp_path, capsys):
    """Up to rounding: in float64 loss and gradient agree to nine digits, and every sample is the same."""
    options |= {"dtype": "float64", "keep": 0}
    go(options, tmp_path / "one")
    with pytest.raises(Interrupted):
        train(TrainConfig(**{**options, "out": str(tmp_path / "two")}), [Stop(3)])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
                go(options, tmp_path / "two", resume=True)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    one, two = tmp_path / "one", tmp_path / "two"
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    for ours, theirs in zip(metrics(two)[1:], metrics(one)[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9, abs=1e-12)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
    ours, theirs = weights(two), weights(one)
    assert all((ours[name] - theirs[name]).abs().max() < 1e-9 for name in theirs)
    state = json.loads((two / "checkpoints/step_000006/trainer/state.json").read_text())
    assert state["ranks"] == 2
    go(options, two, steps=7, resume=True, quiet=False)  # and with one again
    assert "1 process(es) in place of 2" in capsys.readouterr().err


def test_parts_of_ones_own_go_on_with_as_many_processes_as_before(tmp_path):
    from kenpo.runs.continuing import check_processes

    own = TrainConfig(model="m", engine="mine.py:Engine")
    assert check_processes(tmp_path, 2, 2, own) is None
    with pytest.raises(InputError, match=r"used 2 process.*--engine mine.py:Engine.*resume it with 2"):
        check_processes(tmp_path, 2, 1, own)
    assert "not bit for bit" in check_processes(tmp_path, 2, 1, TrainConfig(model="m"))


def test_the_best_checkpoint_by_a_figure_is_kept(options, tmp_path):
    options |= {"eval_every": 1, "checkpoint_every": 0, "keep": 1, "correct_at": 0.3}
    for figure, choose in (("eval/reward", max), ("eval/length", min)):
        run = tmp_path / figure.replace("/", "-")
        summary = go(options, run, keep_best=figure)
        values = {n["step"]: n[figure]["sum"] / n[figure]["count"] for n in metrics(run)[1:]}
        best = choose(values.values())
        step = min(s for s, v in values.items() if v == best)
        assert summary["best"] == {"figure": figure, "value": best, "step": step}
        kept = [checkpoints.step_of(p) for p in checkpoints.found(run / "checkpoints")]
        assert kept == sorted({step, 6})
        assert load_file(run / f"checkpoints/step_{step:06d}/model.safetensors")
    with pytest.raises(InputError, match="no such figure; it makes eval/accuracy"):
        go(options, tmp_path / "none", keep_best="eval/loss")
    assert not (tmp_path / "none").exists()
    with pytest.raises(InputError, match="nothing is measured"):
        go(options, tmp_path / "none", keep_best="eval/accuracy", eval_problems=0)


def test_the_best_so_far_is_known_to_a_resumed_run(options, tmp_path):
    options |= {"eval_every": 1, "keep": 1, "keep_best": "eval/reward"}
    whole = go(options, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(TrainConfig(**{**options, "out": str(tmp_path / "cut")}), [Stop(4)])
    assert go(options, tmp_path / "cut", resume=True)["best"] == whole["best"]
    ours, theirs = ([p.name for p in checkpoints.found(tmp_path / n / "checkpoints")] for n in ("cut", "whole"))
    assert ours == theirs
