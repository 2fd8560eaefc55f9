"""Bad input: one line on standard error, exit status 2, and no run folder."""

import json

import pytest

from kenpo.cli import main
from kenpo.trainer.config import TrainConfig, resolve, to_dict


@pytest.fixture
def refused(models, tmp_path, capsys):
    """Run `kenpo train` with bad options; check status, the one line and the absence of the folder; return the line."""

    def check(*more, out=True, model="qwen3", status=2):
        capsys.readouterr()
        argv = ["train", "--model", str(models / model), "--steps", "2", "--prompts", "2", "--group-size", "2",
                "--max-tokens", "6", "--eval-problems", "3", "--threads", "1", "--quiet",
                *map(str, more)]  # fmt: skip
        run = tmp_path / "run"
        assert main([*argv, "--out", str(run)] if out else argv) == status
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith("kenpo train: ")
        assert not run.exists() or not out
        assert not list(tmp_path.glob(".run*"))
        return error

    return check


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_unknown_names(refused, tmp_path):
    assert "did you mean" in refused("--algorithm", "grpoo")
    assert "additon" in refused("--task", "additon")
    assert "surrogate.hi" in refused("--set", "surrogate.hi=0.3")
    assert "untruncate" in refused("--with", "untruncate")
    assert "numbric" in refused("--verifier", "numbric")
    assert "--lrr" in refused("--lrr", "1")
    rows = [{"prompt": "1+1=", "answer": 2}] * 20
    data = write(tmp_path / "d.jsonl", rows)
    assert "question" in refused("--task", data, "--prompt-column", "question")
    assert "nosuch" in refused("--loggers", "nosuch")


def test_data_files(refused, tmp_path):
    empty = tmp_path / "e.jsonl"
    empty.write_text("")
    assert "e.jsonl" in refused("--task", empty)
    rows = [{"prompt": "1+1=", "answer": 2}] * 20 + [{"prompt": "2+2="}]
    assert "answer" in refused("--task", write(tmp_path / "d.jsonl", rows))
    assert "nothere" in refused("--task", tmp_path / "nothere.jsonl")


def test_a_model_folder_without_weights(refused, models, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((models / "qwen3" / "config.json").read_text())
    assert "no weights" in refused("--model", folder)
    assert "nosuchdir" in refused("--model", "./nosuchdir")


@pytest.mark.parametrize(
    "body", ["raise ValueError('broken')", "import time; time.sleep(60)", "return float('nan')", "return None"]
)
def test_a_reward_function_without_any_verdict(refused, tmp_path, body):
    path = tmp_path / "r.py"
    path.write_text(f"def reward(completion, answer, **kw):\n    {body}\n")
    for held_out in ("0", "3"):  # met in the first batch, or already in the first evaluation
        limit = ("--time-limit", "0.3")
        error = refused("--verifier", f"{path}:reward", "--eval-problems", held_out, *limit)
        assert "no verdict" in error


def test_group_of_one_with_a_group_advantage(refused):
    assert "group_z_score" in refused("--group-size", "1")


def test_a_prompt_longer_than_the_context(refused, tmp_path):
    rows = [{"prompt": f"1+{n}=", "answer": n + 1} for n in range(30)]
    rows[7]["prompt"] = "1+" * 40
    error = refused("--task", write(tmp_path / "d.jsonl", rows), "--verifier", "numeric", "--prompts", "27")
    assert "d.jsonl: line 8" in error
    assert "64" in error


def test_a_long_prompt_that_only_a_later_step_would_meet(refused, tmp_path):
    rows = [{"prompt": f"1+{n}=", "answer": n + 1} for n in range(30)]
    rows[7]["prompt"] = "1+" * 40
    data = write(tmp_path / "d.jsonl", rows)
    assert "d.jsonl: line 8" in refused("--task", data, "--verifier", "numeric", "--steps", "14")
    more = ("--algorithm", "dapo", "--max-refills", "6")
    assert "d.jsonl: line 8" in refused("--task", data, "--verifier", "numeric", "--steps", "2", *more)


def test_an_existing_run_folder(refused, tmp_path):
    (tmp_path / "there").mkdir()
    assert "exists already" in refused("--out", tmp_path / "there", out=False)
    (tmp_path / "loose").symlink_to("nowhere")
    assert "exists already" in refused("--out", tmp_path / "loose", out=False)


def test_a_run_folder_that_cannot_be_made(refused, tmp_path):
    (tmp_path / "file").write_text("")
    error = refused("--out", tmp_path / "file" / "run", out=False)
    assert "file is not a folder that can be written to" in error


def test_numbers_that_no_run_can_use(refused):
    for option in ("--lr", "--weight-decay", "--temperature", "--correct-at", "--grad-clip"):
        for value in ("inf", "nan"):
            error = refused(option, value)
            assert option in error
    assert "64 bits" in refused("--seed", 2**63)
    assert "given twice" in refused("--set", "surrogate.high=0.3", "--set", "surrogate.high=0.4")


def test_an_algorithm_file_that_ends_the_process(refused, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys\nsys.exit(0)\n")
    assert "SystemExit" in refused("--algorithm", f"{path}:MINE")


def test_resume_without_a_run_or_with_another_configuration(refused, tmp_path):
    assert "no config.json" in refused("--resume", tmp_path / "none", out=False)
    run = tmp_path / "old"
    run.mkdir()
    config = resolve(TrainConfig(seed=3, threads=1))
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    error = refused("--resume", run, "--seed", "4", out=False)
    assert "seed was 3, now 4" in error
    assert "lr" not in error


def test_a_logger_whose_package_is_missing(refused):
    pytest.importorskip("tensorboard")
    assert "pip install trackio" in refused("--loggers", "trackio")


def test_a_field_that_the_trainer_does_not_supply(refused, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import kenpo\nfrom dataclasses import dataclass\nfrom kenpo.stages.base import Weight\n"
        "@dataclass(frozen=True)\nclass Routed(Weight):\n    _needs = frozenset({'routes'})\n"
        "    def __call__(self, ctx):\n        return ctx.mask\n"
        "MINE = kenpo.get('grpo').but(weights=(Routed(),))\n"
    )
    error = refused("--algorithm", f"{path}:MINE")
    assert "routed" in error
    assert "routes" in error
