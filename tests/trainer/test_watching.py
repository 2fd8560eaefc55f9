"""What a run shows and leaves: plan, progress, folder, loggers, callbacks."""

import json
from pathlib import Path

import pytest

import kenpo
from kenpo.cli import main
from kenpo.learner.optimizer import learning_rate
from kenpo.runs.callbacks import Callback
from kenpo.runs.folder import default_path, next_in_series
from kenpo.runs.progress import Lines, Panel, rows, sparkline
from kenpo.trainer.config import TrainConfig, load, resolve
from kenpo.trainer.loop import train
from kenpo.trainer.plan import check_group_size, plan_passes


def passes(name="grpo", **fields):
    return plan_passes(
        kenpo.get(name), resolve(TrainConfig(model="m", threads=1, **fields)), fields.pop("vocabulary", 17)
    )


def test_passes_follow_from_what_the_stages_need():
    once, twice = passes(), passes(epochs=2)
    assert (once.old, once.reference) == (False, True)
    assert "π_old is π_θ itself" in once.old_why
    assert twice.old
    assert "2 updates" in twice.old_why
    assert not passes("dapo").reference
    assert "kl_to_reference" in once.reference_why
    assert once.two_phase is None
    assert plan_passes(kenpo.get("dapo"), resolve(TrainConfig(model="m")), 150_000).entropy is False


def test_groups_of_one_pass_where_no_stage_compares_them():
    one = resolve(TrainConfig(group_size=1))
    with pytest.raises(kenpo.errors.InputError, match="group_z_score"):
        check_group_size(kenpo.get("grpo"), one)


def test_what_an_advantage_reads_is_scored_before_it_is_made():
    """KL in the reward, with one update of the batch: π_old is scored all the same."""
    plain, penalised = kenpo.get("reinforce_pp"), kenpo.get("reinforce_pp").with_settings({"advantage.beta": 0.1})
    config = resolve(TrainConfig(model="m", threads=1))
    assert not plan_passes(plain, config, 17).old
    found = plan_passes(penalised, config, 17)
    assert found.old
    assert "before the first update" in found.old_why


def test_learning_rate_course():
    c = resolve(TrainConfig(model="m", lr=1.0, steps=10, warmup=2, schedule="linear"))
    how = {"lr": c.lr, "steps": c.steps, "warmup": c.warmup}
    rates = [learning_rate(s, **how, schedule="linear") for s in range(1, 11)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 8)
    assert learning_rate(3, **how, schedule="cosine") == 1.0
    assert learning_rate(10, **how) == 1.0


def test_dry_run_prints_the_plan_and_writes_nothing(models, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [
        "train",
        "--model",
        str(models / "qwen3"),
        "--algorithm",
        "dr_grpo",
        "--dry-run",
        "--max-tokens",
        "9",
        "--epochs",
        "2",
    ]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "aggregate.length = 9" in text
    assert "up to 9 tokens each, 64 with the prompt" in text
    assert "old log-probs    yes" in text
    assert "2 optimizer step(s)" in text
    assert "MiB" in text
    assert list(tmp_path.iterdir()) == []


def test_dry_run_counts_the_problems_there_are(models, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"1{i}+3=", "answer": str(i + 13)}) + "\n" for i in range(10, 70)))
    argv = ["train", "--dry-run", "--model", str(models / "qwen3"), "--task", str(data), "--max-tokens", "9"]
    assert main([*argv, "--verifier", "numeric", "--out", str(tmp_path / "run")]) == 0
    assert "held-out: 12 problems" in capsys.readouterr().out


class Recorder(Callback):
    def __init__(self):
        self.heard = []

    def on_start(self, config, path, step):
        self.heard.append(("start", step))

    def on_step(self, step, figures):
        self.heard.append(("step", step))

    def on_eval(self, step, figures):
        self.heard.append(("eval", step))

    def on_checkpoint(self, step, path):
        self.heard.append(("checkpoint", step))

    def on_end(self, summary):
        self.heard.append(("end", summary and summary["steps"]))


def test_a_run_leaves_its_folder_and_tells_its_callbacks(options, tmp_path, capsys):
    run, recorder, lines = tmp_path / "run", Recorder(), Lines()
    options |= {"steps": 3, "quiet": False, "loggers": ("tensorboard",), "keep": 0}
    pytest.importorskip("tensorboard")
    summary = kenpo.train(TrainConfig(**options, out=str(run)), callbacks=[recorder, lines, Panel()])
    assert recorder.heard == [
        ("start", 0), ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("checkpoint", 2), ("step", 3), ("eval", 3),
        ("checkpoint", 3), ("end", 3),
    ]  # fmt: skip
    assert {p.name for p in run.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json", "samples.jsonl", "batches", "checkpoints", "curve.png",
        "tensorboard",
    }  # fmt: skip
    assert load(run / "config.json").settings == {"regularizers": []}
    written = json.loads((run / "summary.json").read_text())
    assert written["eval"].keys() == {"before", "after"}
    assert written["tokens"].keys() == {"generated", "filtered", "trained"}
    assert written["peak_rss_bytes"] > 10**7
    assert summary["run"] == str(run)
    figures = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [f["step"] for f in figures] == [0, 1, 2, 3]
    assert figures[1]["reward"].keys() == {"sum", "count"}
    assert figures[1]["sampler_gap"] < 1e-5
    assert figures[1]["update_skipped"] == {"sum": 0.0, "count": 1.0}
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 12
    out = capsys.readouterr().out
    assert "step 3/3" in out
    assert "held-out accuracy" in out
    assert "done:" in out
    assert [name for name, _ in rows(figures[1])] == [
        "reward",
        "entropy",
        "clipped",
        "length",
        "groups",
        "tokens/s",
        "time",
    ]


def test_config_repeats_the_run(options, tmp_path):
    options |= {"steps": 2}
    train(TrainConfig(**options, out=str(tmp_path / "a")))
    assert (
        main(["train", "--config", str(tmp_path / "a" / "config.json"), "--out", str(tmp_path / "b"), "--quiet"]) == 0
    )
    a, b = ((tmp_path / n / "samples.jsonl").read_bytes() for n in "ab")
    assert a == b


def test_a_series_resumes_its_unfinished_last_run(tmp_path):
    first = tmp_path / "first"
    assert next_in_series(first) == (first, False)
    first.mkdir()
    assert next_in_series(first) == (first, True)
    (first / "summary.json").write_text("{}")
    second = tmp_path / "first-2"
    assert next_in_series(first) == (second, False)
    second.mkdir()
    assert next_in_series(first) == (second, True)
    (second / "lock").write_text("")  # all that a process left that died before the run began
    assert next_in_series(first) == (second, False)


def test_series_from_the_command_line(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["train", "--model", options["model"], "--verifier", options["verifier"], "--steps", "2", "--prompts", "2",
            "--group-size", "2", "--max-tokens", "5", "--eval-problems", "0", "--threads", "1", "--quiet",
            "--series", "runs/first"]  # fmt: skip
    assert main(base) == 0
    assert main([*base, "--seed", "1"]) == 0
    (Path("runs/first-2") / "summary.json").unlink()
    assert main([*base[:1], "--series", "runs/first", "--quiet"]) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["first", "first-2"]
    assert load("runs/first-2/config.json").seed == 1
    assert main([*base, "--out", "runs/mine"]) == 0
    assert Path("runs/mine/summary.json").exists()


def test_default_folder_names(tmp_path):
    config = TrainConfig(task="reasoning_gym:chain_sum", algorithm="my/algos.py:MINE")
    assert default_path(config.algorithm, config.task, tmp_path).name == "algos.py-MINE-reasoning_gym-chain_sum-1"
    (tmp_path / "grpo-data-1").mkdir()
    assert default_path("grpo", "x/data.jsonl", tmp_path).name == "grpo-data-2"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"


def test_bfloat16_keeps_master_weights(options, tmp_path):
    """Updates far below bfloat16's resolution add up in the master weights, across a resume too."""
    from safetensors.torch import load_file

    from kenpo.runs.checkpoint import found

    options |= {"dtype": "bfloat16", "lr": 1e-6, "steps": 4}
    train(TrainConfig(**options, out=str(tmp_path / "a")))
    state = load_file(found(tmp_path / "a" / "checkpoints")[-1] / "trainer" / "optimizer.safetensors")
    masters = [n for n in state if n.startswith("master.")]
    weights = load_file(found(tmp_path / "a" / "checkpoints")[-1] / "model.safetensors")
    moved = sum(float((state[n] - weights[n.removeprefix("master.")].float()).abs().sum()) for n in masters)
    assert moved > 0
