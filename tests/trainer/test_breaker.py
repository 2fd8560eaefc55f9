"""Folders and checkpoints that were damaged or made with ill will: one line each, with the mend."""

import json
import pickle
import shutil

import pytest
import torch

import kenpo
from kenpo.cli import main
from kenpo.errors import InputError, RunError
from kenpo.models.loading import load_model
from kenpo.trainer.config import TrainConfig


@pytest.fixture
def unfinished(options, tmp_path):
    """A run with checkpoints of steps 1 and 2, of 3."""
    run = tmp_path / "run"
    kenpo.train(TrainConfig(**{**options, "steps": 3, "checkpoint_every": 1, "keep": 0}, out=str(run)))
    shutil.rmtree(run / "checkpoints" / "step_000003")
    (run / "summary.json").unlink()
    return run


def said(capsys, *args, status=2):
    capsys.readouterr()
    assert main([str(a) for a in args]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_values_of_another_kind_in_a_checkpoint(unfinished, capsys):
    path = unfinished / "checkpoints" / "step_000002" / "trainer" / "state.json"
    good = json.loads(path.read_text())
    bad = [
        {"step": "two"}, {"step": True}, {"step": -1}, {"tokens": []}, {"tokens": {"generated": "x"}}, {"evals": 3},
        {"files": {"metrics.jsonl": "x"}}, {"ranks": None}, {"seconds": "x"}, {"versions": []}, {"stands_on": []},
        {"rng": {}}, {"rng": {"python": [3, [1, 2], None]}}, {"rng": {"python": [3, ["x"] * 625, None]}}, {"rng": 1},
    ]  # fmt: skip
    for changes in bad:
        path.write_text(json.dumps({**good, **changes}))
        error = said(capsys, "train", "--resume", unfinished, "--quiet")
        assert "step_000002: not a checkpoint that training can go on from; remove that folder" in error, changes
        assert "goes on from step_000001" in error


def test_cut_weights_of_a_checkpoint_say_what_to_do(unfinished, capsys):
    weights = unfinished / "checkpoints" / "step_000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    error = said(capsys, "train", "--resume", unfinished, "--quiet")
    assert "remove that folder and resume, which goes on from step_000001" in error
    shutil.rmtree(weights.parent)
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_a_pickle_is_not_run_and_nobody_is_told_to_run_it(models, tmp_path):
    shutil.copytree(models / "llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(
        {"lm_head.weight": Evil(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin", pickle_module=pickle
    )
    with pytest.raises(InputError, match="save the model as safetensors") as refused:
        load_model(tmp_path / "model")
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_larger_than_the_model_is_met_before_sampling(models, options, tmp_path, capsys):
    from transformers import AutoTokenizer

    shutil.copytree(models / "qwen3", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["Z"])
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [{"prompt": f"{n}+1=", "answer": n} for n in range(12)]
    lines[7]["prompt"] = "Z"
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    command = [
        "--model",
        tmp_path / "model",
        "--task",
        tmp_path / "task.jsonl",
        "--eval-problems",
        "0",
        "--steps",
        "20",
    ]
    error = said(capsys, "train", *command, "--prompts", "2", "--quiet", "--out", run)
    assert "outside the model's vocabulary" in error
    assert "task.jsonl: line 8" in error
    assert not run.exists()


def test_a_model_whose_responses_can_not_end(models, tmp_path, capsys):
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(models / "qwen3", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))
    error = said(capsys, "sample", folder, "--prompt", "1+2=")
    assert "end-of-sequence" in error
    assert "--stop" in error
    assert main(["sample", str(folder), "--prompt", "1+2=", "--stop", "=", "--max-tokens", "3"]) == 0


def test_a_run_that_diverges_is_no_bad_input(options, tmp_path):
    config = {**options, "steps": 6, "lr": 1e30, "grad_clip": 0.0, "eval_every": 0, "checkpoint_every": 1}
    with pytest.raises(RunError) as stopped:
        kenpo.train(TrainConfig(**config, out=str(tmp_path / "run")))
    assert stopped.value.exit_status == 1
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_sft_looks_at_the_place_and_at_every_row_before_it_trains(models, tmp_path, capsys):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
    data = tmp_path / "pairs.jsonl"
    command = ["sft", "--model", models / "qwen3", "--data", data, "--steps", "8", "--batch", "1", "--quiet"]
    for bad in ("1" * 200, "\ud800"):
        data.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:5], {**rows[5], "response": bad}, *rows[6:]]))
        assert "line 6" in said(capsys, *command, "--eval-problems", "0", "--out", tmp_path / "a")
        assert not (tmp_path / "a").exists()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "file").write_text("")
    assert "is not a folder that can be written to" in said(capsys, *command, "--out", tmp_path / "file" / "x")
