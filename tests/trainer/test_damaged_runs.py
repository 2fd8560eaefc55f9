"""A run folder that was damaged: resuming it says so in one line, or goes on where the damage does not matter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import kenpo
from kenpo.cli import main
from kenpo.trainer.config import TrainConfig


@pytest.fixture
def unfinished(options, tmp_path):
    """A run of three steps whose last checkpoint is that of step 2."""
    run = tmp_path / "run"
    kenpo.train(TrainConfig(**{**options, "steps": 3, "log_samples": 4}, out=str(run)))
    shutil.rmtree(run / "checkpoints" / "step_000003")
    (run / "summary.json").unlink()
    return run


@pytest.fixture
def said(unfinished, capsys):
    """Resume the run, which fails with the given status; the one line."""

    def check(status=2):
        capsys.readouterr()
        assert main(["train", "--resume", str(unfinished), "--quiet"]) == status
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return check


def test_damaged_checkpoints(unfinished, said):
    trainer = unfinished / "checkpoints" / "step_000002" / "trainer"
    state, tensors = trainer / "state.json", trainer / "optimizer.safetensors"
    good, whole = state.read_text(), tensors.read_bytes()
    for bad in ("", "[]", "{}", '{"format": 1}', json.dumps({**json.loads(good), "later": 1})):
        state.write_text(bad)
        assert "step_000002" in said()
    state.write_text(good)
    for cut in (0, 1000, len(whole) - 1):
        tensors.write_bytes(whole[:cut])
        assert "not a checkpoint" in said()
    save_file({"other": torch.zeros(1)}, str(tensors))
    assert "rng.torch" in said()
    older = tensors.parents[2] / "step_000001"
    older.mkdir()
    assert "remove that folder and resume, which goes on from step_000001" in said()
    older.rmdir()
    tensors.write_bytes(whole)
    assert "rng.torch" in load_file(str(tensors))


def test_damaged_files_beside_the_checkpoints(unfinished, said):
    config, metrics = unfinished / "config.json", unfinished / "metrics.jsonl"
    text = config.read_text()
    config.write_bytes(b"\xff\xfe")
    assert "not a text file" in said()
    config.write_text(json.dumps({**json.loads(text), "threads": "one"}))
    assert "--threads" in said()
    config.write_text(text)
    content = metrics.read_bytes()
    metrics.write_bytes(b"\xff{" + content[2:])
    assert "damaged" in said(status=1)
    metrics.write_bytes(content)
    summary = unfinished / "summary.json"
    summary.write_text("{")  # steps are still missing: the run goes on and writes another
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0
    assert json.loads(summary.read_text())["steps"] == 3
    summary.write_text("{")
    assert "summary.json: damaged" in said(status=1)


def test_files_of_the_user_among_the_batches_are_left_alone(unfinished):
    notes = unfinished / "batches" / "notes.txt"
    notes.write_text("mine")
    (unfinished / "batches" / "000009.safetensors.tmp").write_text("")
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0
    assert notes.read_text() == "mine"
    names = [p.name for p in sorted((unfinished / "batches").iterdir())]
    assert names == ["000001.safetensors", "000002.safetensors", "000003.safetensors", "notes.txt"]


def test_a_run_that_stopped_in_its_first_step_keeps_one_line_of_it(options, tmp_path, capsys):
    """Dynamic sampling that finds nothing to train on saves step 0; resuming does not measure the start again."""
    verifier = tmp_path / "never.py"
    verifier.write_text("def never(completion, answer):\n    return 0.0\n")
    run = tmp_path / "run"
    config = {**options, "algorithm": "dapo", "settings": None, "verifier": f"{verifier}:never", "max_refills": 0}
    with pytest.raises(kenpo.errors.KenpoError, match="kept 0 of"):
        kenpo.train(TrainConfig(**config, out=str(run)))
    assert main(["train", "--resume", str(run), "--quiet"]) == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0]
