"""What a run is told before it costs anything, and what it says later: a full disk, NaN weights, rewards all alike,
warnings on one line, and none about distances that the plan has spoken of already."""

import shutil
import subprocess
import sys
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import kenpo
from kenpo.cli import main
from kenpo.errors import NoDivergenceWarning
from kenpo.learner.memory import ModelFacts
from kenpo.learner.planning import Passes
from kenpo.runs import disk
from kenpo.runs.folder import RunFolder
from kenpo.runs.watching import Watch
from kenpo.terminal import warning_line
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.loop import train
from kenpo.trainer.plan import checkpoint_room
from kenpo.types import Rollouts

Usage = namedtuple("Usage", "total used free")


def batch(*rewards):
    n = len(rewards)
    return Rollouts(mask=torch.tensor([[False, True]]).repeat(n, 1), group=torch.zeros(n, dtype=torch.int64),
                    rewards=torch.tensor(rewards), truncated=torch.zeros(n, dtype=torch.bool))  # fmt: skip


def test_rewards_all_alike_are_told_at_once_and_later_after_three_in_a_row():
    watch = Watch(kenpo.get("grpo"))
    same, differ = batch(0.0, 0.0), batch(0.0, 1.0)
    said = [watch(b, step) for step, b in enumerate((same, same, differ, same, same, same, same), 1)]
    assert [len(lines) for lines in said] == [1, 0, 0, 0, 0, 1, 0]
    assert said[0][0].startswith("all 2 rewards are 0: ")
    assert said[5][0].startswith("in 3 batches in a row, all 2 rewards are 0: ")
    assert Watch(kenpo.get("sft"))(same, 1) == []


def test_a_run_that_stops_learning_is_told(options, tmp_path, capsys):
    (tmp_path / "once.py").write_text(
        "def judge(prompts, completions, answers):\n"
        "    import pathlib\n"
        f"    seen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "    first = not seen.exists()\n"
        "    seen.touch()\n"
        "    return [float(i % 2) if first else 0.0 for i in range(len(completions))]\n"
    )
    more = {"verifier": f"{tmp_path / 'once.py'}:judge", "quiet": False, "eval_problems": 0, "verifier_workers": 1}
    train(TrainConfig(**{**options, **more}, out=str(tmp_path / "run")))
    assert capsys.readouterr().err.count("batches in a row, all ") == 1


@pytest.mark.parametrize(("steps", "every", "keep", "number"), [
    (12, 4, 2, 3), (12, 4, 1, 2), (12, 4, 0, 3), (12, 4, 9, 3), (12, 0, 2, 1), (10, 4, 0, 3),
])  # fmt: skip
def test_how_many_checkpoints_lie_on_the_disk(steps, every, keep, number):
    config = resolve(TrainConfig(steps=steps, checkpoint_every=every, keep=keep, device="cpu"))
    facts = ModelFacts(parameters=1000, bytes_each=4, layers=1, hidden=1, vocabulary=5, kv_width=1, chunk=None,
                       trainable=1000, unshared=None, context=None, padded=None)  # fmt: skip
    passes = Passes(1, False, "", False, "", None, None, False, "")
    assert checkpoint_room(config, passes, facts) == (number, 1000 * 4 + 2 * 1000 * 4)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_disk_without_room_is_met_before_the_first_step(command, options, tmp_path, capsys, monkeypatch):
    looked = []

    def usage(place):
        looked.append(place)
        return Usage(10**9, 10**9 - 1000, 1000)

    monkeypatch.setattr(disk.shutil, "disk_usage", usage)
    run = tmp_path / "not" / "there" / "yet"
    assert (
        main([command, "--model", options["model"], "--steps", "1", "--threads", "1", "--quiet", "--out", str(run)])
        == 2
    )
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "1 checkpoint(s) of about " in error
    assert "0.0 MiB are free on that disk; free some, " in error
    assert looked
    assert not (tmp_path / "not").exists()


def test_room_is_asked_of_the_disk_that_will_hold_the_run(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    RunFolder(tmp_path / "a").create({}, 2, free // 4)
    with pytest.raises(kenpo.errors.InputError, match=r"2 checkpoint\(s\)"):
        RunFolder(tmp_path / "b").create({}, 2, free)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["sample", "eval", "train"])
def test_nan_weights_are_one_line(command, models, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    shutil.copytree(models / "qwen3", tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    args = {
        "sample": ["sample", "nan", "--prompt", "1+1="],
        "eval": ["eval", "nan", "--problems", "2"],
        "train": ["train", "--model", "nan", "--steps", "1", "--eval-problems", "2", "--quiet", "--out", "run"],
    }[command]
    done = subprocess.run([sys.executable, "-m", "kenpo", *args], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "its weights are damaged" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_warning_of_kenpo_is_a_note_and_others_stay_as_they_are(capsys):
    own = str(Path(kenpo.__file__).parent / "engines" / "hf.py")
    assert warning_line("a\n b\x1b", UserWarning, own) == "note: a b\\x1b\n"
    assert warning_line("x", NoDivergenceWarning, "/elsewhere/loop.py") == "note: x\n"
    assert warning_line("x", UserWarning, "/elsewhere/loop.py") is None
    before = warnings.formatwarning
    try:
        assert main(["--version"]) == 0
        assert warnings.formatwarning("x", UserWarning, own, 3) == "note: x\n"
        assert warnings.formatwarning("x", UserWarning, "/elsewhere/loop.py", 3).startswith(
            "/elsewhere/loop.py:3: User"
        )
    finally:
        warnings.formatwarning = before


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("name", ["tis", "dppo", "m2po", "trm", "icepop"])
def test_a_run_never_warns_of_distances_that_its_notes_speak_of(name, updates, options, tmp_path, capsys):
    more = {"algorithm": name, "steps": 2, "minibatches": updates, "eval_problems": 0, "quiet": False, "settings": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoDivergenceWarning)
        train(TrainConfig(**{**options, **more}, out=str(tmp_path / "run")))
    assert ("can't act" in capsys.readouterr().err) == (updates == 1 or name in ("tis", "icepop"))


def test_the_benchmark_names_the_sides_there_are():
    script = Path(__file__).parents[2] / "benchmarks" / "logprob.py"
    done = subprocess.run([sys.executable, script, "--only", "bf16:liger"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no bf16:liger; there are float32:ours, float32:liger" in done.stderr
