"""A run that was stopped, at any moment and in any way, ends as the run that was left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kenpo
from kenpo.cli import main
from kenpo.errors import InputError, RunError
from kenpo.runs import checkpoint as checkpoints
from kenpo.runs.callbacks import Callback
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import Interrupted, train


def metrics(run):
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def weights(run):
    return load_file(checkpoints.found(run / "checkpoints")[-1] / "model.safetensors")


def same_end(run, reference):
    """The same weights, optimizer, metrics, samples and recorded batches, bit for bit."""
    assert metrics(run) == metrics(reference)
    assert (run / "samples.jsonl").read_bytes() == (reference / "samples.jsonl").read_bytes()
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    batches = sorted(p.name for p in (reference / "batches").iterdir())
    assert sorted(p.name for p in (run / "batches").iterdir()) == batches
    for name in batches:
        assert (run / "batches" / name).read_bytes() == (reference / "batches" / name).read_bytes()
    optimizer = "trainer/optimizer.safetensors"
    last = [checkpoints.found(r / "checkpoints")[-1] / optimizer for r in (run, reference)]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert not list(run.rglob("*.tmp*"))
    summaries = [json.loads((r / "summary.json").read_text()) for r in (run, reference)]
    assert summaries[0]["eval"] == summaries[1]["eval"]
    assert summaries[0]["tokens"] == summaries[1]["tokens"]


def stop_after(step, action):
    """A callback that does `action` once `step` is done."""

    class Stop(Callback):
        def on_step(self, done, figures):
            if done == step:
                action()

    return [Stop()]


@pytest.fixture
def reference(options, tmp_path):
    run = tmp_path / "reference"
    train(TrainConfig(**options, out=str(run)))
    return run


@pytest.mark.parametrize("step", [1, 3, 5])
def test_an_exception_between_steps(options, reference, tmp_path, step):
    run = tmp_path / "run"

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**options, out=str(run)), stop_after(step, fall))
    random.random(), torch.rand(3)  # other uses of the global generators do not matter
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    same_end(run, reference)


def test_several_updates_per_batch_and_a_reference(options, tmp_path):
    options |= {
        "minibatches": 2,
        "epochs": 2,
        "settings": {},
        "schedule": "cosine",
        "warmup": 2,
        "weight_decay": 0.1,
        "steps": 4,
        "betas": (0.8, 0.9),
    }
    train(TrainConfig(**options, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**options, out=str(tmp_path / "b")), stop_after(3, fall))
    train(TrainConfig(out=str(tmp_path / "b"), resume=True, **dict(options.items())))
    same_end(tmp_path / "b", tmp_path / "a")
    line = metrics(tmp_path / "a")[2]
    assert line["updates"] == 4
    assert line["ratio_max"] > 1  # later updates are off-policy: ratios move
    assert line["kl_to_reference"]["sum"] > 0


def test_a_signal_finishes_the_step_and_says_how_to_go_on(options, reference, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(
        Interrupted, match=f"stopped after step 3 by SIGTERM; go on with: kenpo train --resume {run}"
    ) as stop:
        train(TrainConfig(**options, out=str(run)), stop_after(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert stop.value.exit_status == 143
    assert checkpoints.found(run / "checkpoints")[-1].name == "step_000003"
    train(TrainConfig(out=str(run), resume=True, **options))
    same_end(run, reference)


def kill_and_resume(spawn, argv, run, lines, delay=0.0):
    """SIGKILL `delay` seconds after metrics.jsonl has `lines` lines; then resume to the end."""
    process, log = spawn(*argv, "--out", run), run / "metrics.jsonl"
    while process.poll() is None and not (
        run.exists() and (log.read_bytes() if log.exists() else b"").count(b"\n") >= lines
    ):
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL  # it was still at work
    done = spawn("train", "--resume", run, "--quiet")
    _, error = done.communicate(timeout=240)
    assert done.returncode == 0, error


def killed_run(options):
    """Command-line options of a longer run, so that a kill falls inside it."""
    return ["train", "--model", options["model"], "--verifier", options["verifier"], "--steps", "12", "--prompts", "3",
            "--group-size", "4", "--max-tokens", "8", "--lr", "1e-3", "--eval-problems", "5", "--eval-every", "2",
            "--checkpoint-every", "2", "--threads", "1", "--set", "regularizers=[]", "--quiet"]  # fmt: skip


def test_sigkill(options, spawn, tmp_path):
    argv = killed_run(options)
    assert main([*argv, "--out", str(tmp_path / "reference")]) == 0
    kill_and_resume(spawn, argv, tmp_path / "run", 6, 0.03)
    same_end(tmp_path / "run", tmp_path / "reference")


@pytest.mark.slow
def test_sigkill_at_ten_random_moments(options, spawn, tmp_path):
    argv = killed_run(options)
    assert main([*argv, "--out", str(tmp_path / "reference")]) == 0
    moments = random.Random(0)
    for i in range(10):
        run = tmp_path / f"run{i}"
        kill_and_resume(spawn, argv, run, moments.randrange(0, 10), moments.uniform(0.0, 0.1))
        same_end(run, tmp_path / "reference")


def test_what_interrupted_writes_leave_is_removed(options, reference, tmp_path):
    """Leftovers of every kind of write, lines past the checkpoint, half a line."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "checkpoints" / "step_000006")
    (run / "summary.json").unlink()
    shutil.copytree(run / "checkpoints" / "step_000004", run / "checkpoints" / "step_000006.tmp")
    (run / "checkpoints" / "step_000002.tmp-old").mkdir()
    (run / "batches" / "000006.safetensors.tmp").write_bytes(b"half")
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "rew')
    train(TrainConfig(out=str(run), resume=True, **options))
    same_end(run, reference)


def test_a_finished_run_is_left_as_it_is(options, reference, capsys):
    """A checkpoint at the very end resumes to "already finished", not to a run of no steps or to more steps."""
    before = {p: p.read_bytes() for p in reference.rglob("*") if p.is_file()}
    assert main(["train", "--resume", str(reference)]) == 0
    assert "already finished after 6 steps" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in reference.rglob("*") if p.is_file()} == before


def test_killed_after_the_last_checkpoint_but_before_the_summary(options, reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    (run / "summary.json").unlink()
    summary = train(TrainConfig(out=str(run), resume=True, **options))
    assert summary["steps"] == 6
    same_end(run, reference)


def test_the_data_cursor_goes_on_where_it_was(options, tmp_path):
    """After problems 0-5 were used, the next one is 6: no prompt is seen again."""
    run = tmp_path / "run"
    train(TrainConfig(**(options | {"steps": 2}), out=str(run)))
    state, _, _ = checkpoints.load_state(checkpoints.found(run / "checkpoints")[-1])
    assert state.source == {"cursor": 6}
    assert state.step == 2


def test_global_generators_are_put_back_last(tmp_path):
    """Draw 3, save, draw 2; resume, draw 2: the same two numbers."""
    torch.manual_seed(0)
    random.seed(0)
    torch.rand(3), random.random()
    tensors, states = checkpoints.rng_tensors(), json.loads(json.dumps(checkpoints.rng_json()))
    drawn = torch.rand(2).tolist(), random.random()
    torch.manual_seed(99)
    random.seed(99)
    checkpoints.restore_rng(tensors, states)
    assert (torch.rand(2).tolist(), random.random()) == drawn


def test_a_changed_configuration_is_refused(options, reference):
    with pytest.raises(InputError, match=r"lr was 0.001, now 0.5"):
        train(TrainConfig(out=str(reference), resume=True, **(options | {"lr": 0.5})))


def test_a_checkpoint_is_an_ordinary_model_folder(reference):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoints.found(reference / "checkpoints")[-1]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).decode([3, 4]) == "01"
    assert torch.equal(model.lm_head.weight, load_file(path / "model.safetensors")["lm_head.weight"])
    assert {p.name for p in (path / "trainer").iterdir()} == {
        "optimizer.safetensors",
        "state.json",
        "state.safetensors",
    }
    assert len(checkpoints.found(reference / "checkpoints")) == 2  # --keep


def test_a_tied_head_is_written_out(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    from kenpo.experience.addition import character_tokenizer

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=1)
    )
    checkpoints.save_model(tmp_path / "m", model, character_tokenizer())
    assert torch.equal(load_file(tmp_path / "m" / "model.safetensors")["lm_head.weight"], model.transformer.wte.weight)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_intact(options, tmp_path, monkeypatch):
    """The disk fills while the second checkpoint is written, once as Python's error and once as safetensors'."""
    import safetensors.torch as st
    from safetensors import SafetensorError

    real = st.save_file
    for number, failure in enumerate(
        (OSError(28, "No space left on device"), SafetensorError("IoError: No space left on device (os error 28)"))
    ):
        run = tmp_path / f"run{number}"

        def save(tensors, path, *args, failure=failure, **kw):
            if "step_000004" in str(path):
                Path(path).write_bytes(b"half")
                raise failure
            return real(tensors, path, *args, **kw)

        monkeypatch.setattr(st, "save_file", save)
        with pytest.raises(RunError, match="checkpoint step_000004 could not be written: the disk is full") as error:
            train(TrainConfig(**options, out=str(run)))
        assert error.value.exit_status == 1
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000002"]
        checkpoints.load_state(run / "checkpoints" / "step_000002")
        monkeypatch.setattr(st, "save_file", real)
        assert kenpo.train(TrainConfig(out=str(run), resume=True, **options))["steps"] == 6


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root")
def test_a_really_full_disk(options, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")

    class Filler(Callback):
        """Another process, as it were, that takes what is free once there is a checkpoint."""

        def on_checkpoint(self, step, path):
            free = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 65536))

    try:
        with pytest.raises(InputError, match="are free on that disk"):
            train(TrainConfig(**(options | {"steps": 50, "keep": 0}), out=str(disk / "run")))
        assert not (disk / "run").exists()
        with pytest.raises(RunError, match="the disk is full"):
            train(TrainConfig(**(options | {"keep": 1}), out=str(disk / "run")), [Filler()])
        whole = checkpoints.found(disk / "run" / "checkpoints")
        assert whole
        checkpoints.load_state(whole[-1])
        assert not list((disk / "run" / "checkpoints").glob("*.tmp*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
