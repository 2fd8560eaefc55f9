"""Runs whose samples are old: versions and ages, the weights of each version, resume, ranks, drops, notes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kenpo
from kenpo.errors import InputError
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.trainer.config import TrainConfig, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config

CASES = json.loads((Path(__file__).parents[1] / "golden/lag_versions.json").read_text())


@pytest.fixture
def lagged(options):
    return options | {"eval_problems": 0, "record_batches": True, "prompts": 8, "group_size": 2}


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"]]


def batches(run):
    return [load_file(str(f)) for f in sorted((run / "batches").iterdir())]


def same_run(one, two):
    for a, b in zip(batches(one), batches(two), strict=True):
        assert a.keys() == b.keys()
        assert all(
            torch.equal(
                a[n].nan_to_num() if a[n].is_floating_point() else a[n],
                b[n].nan_to_num() if b[n].is_floating_point() else b[n],
            )
            for n in a
        )
    last = "checkpoints/" + max(p.name for p in (one / "checkpoints").iterdir()) + "/model.safetensors"
    x, y = load_file(str(one / last)), load_file(str(two / last))
    assert all(torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("case", [c for c in CASES if c["inputs"]["variant"] == "even"], ids=lambda c: c["name"])
def test_versions_and_ages(case, lagged, tmp_path):
    i, want = case["inputs"], case["expect"]
    options = {"steps": i["batches"], "minibatches": i["minibatches"], "lag": i["lag"], "checkpoint_every": 0}
    train(TrainConfig(**(lagged | options | {"out": str(tmp_path / "run")})))
    for batch, line, version, ages in zip(
        batches(tmp_path / "run"), lines(tmp_path / "run"), want["policy_version"], want["age"], strict=True
    ):
        assert set(batch["policy_version"][batch["mask"]].tolist()) == {version}
        mean = line["staleness"]["sum"] / line["staleness"]["count"]
        assert min(ages) <= mean <= max(ages)
        if len(set(ages)) == 1:
            assert mean == ages[0]


def test_no_lag_is_the_ordinary_run(lagged, tmp_path):
    for name, more in (("plain", {}), ("zero", {"lag": 0})):
        train(TrainConfig(**(lagged | more | {"steps": 3, "out": str(tmp_path / name)})))
    same_run(tmp_path / "plain", tmp_path / "zero")


@pytest.mark.parametrize("noise", [None, "bf16"])
def test_each_log_prob_is_that_of_the_weights_of_its_version(noise, lagged, tmp_path):
    """Every recorded log μ, scored again under the saved weights of its version."""
    run = tmp_path / "run"
    options = {"steps": 5, "minibatches": 2, "lag": 2, "checkpoint_every": 1, "keep": 0, "out": str(run)}
    train(TrainConfig(**(lagged | options | {"sampler_noise": noise})))
    saved = {0: lagged["model"]} | {2 * n: run / f"checkpoints/step_{n:06d}" for n in range(1, 6)}
    seen = set()
    for batch in batches(run):
        mask = batch["mask"]
        (version,) = set(batch["policy_version"][mask].tolist())
        seen.add(version)
        model = load_model(str(saved[version]), dtype="float32", device="cpu")[0]
        rollouts = kenpo.Rollouts(mask=mask, group=batch["group"], rewards=batch["rewards"], tokens=batch["tokens"])
        gap = (Scorer(model).terms(rollouts).logp - batch["logp_sampler"])[mask].abs().max()
        assert float(gap) < 1e-5 if noise is None else 1e-4 < float(gap) < 1
    assert seen == {0, 2, 4}


@pytest.mark.parametrize(
    "more", [{}, {"lora_rank": 2}, {"sampler_noise": "temperature=1.3"}], ids=["model", "adapter", "noise"]
)
def test_a_lagged_run_goes_on_bit_for_bit(more, lagged, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = lagged | more | {"steps": 6, "lag": 2, "minibatches": 2, "keep": 0, "checkpoint_every": 2}
    for run in (whole, cut):
        train(TrainConfig(**(options | {"out": str(run)})))
    for n in (4, 6):
        shutil.rmtree(cut / f"checkpoints/step_00000{n}")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    same_run(whole, cut)


def test_two_processes_give_the_run_of_one(lagged, tmp_path, spawn):
    options = lagged | {"steps": 4, "lag": 1, "minibatches": 2, "dtype": "float64", "out": str(tmp_path / "one")}
    train(TrainConfig(**options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29661")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    for a, b in zip(batches(tmp_path / "one"), batches(tmp_path / "two"), strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["policy_version"], b["policy_version"])
        assert torch.allclose(a["logp_sampler"], b["logp_sampler"], atol=1e-9)


def test_evaluation_asks_the_weights_of_the_moment(lagged, tmp_path):
    """Greedy accuracy after the last step is that of the saved model, however old the samples are."""
    run = tmp_path / "run"
    options = lagged | {"steps": 2, "lag": 5, "lr": 3e-2, "eval_problems": 20, "eval_every": 1, "correct_at": 0.5}
    train(TrainConfig(**(options | {"out": str(run)})))
    told = [line["eval/reward"] for line in lines(run)]
    again = tmp_path / "again"
    last = str(max((run / "checkpoints").iterdir(), key=lambda p: p.name))
    train(TrainConfig(**(options | {"model": last, "steps": 1, "out": str(again)})))
    first = json.loads((again / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0
    assert first["eval/reward"] == told[-1]
    assert told[0] != told[-1]


def test_staleness_is_no_mismatch(lagged, tmp_path):
    """The gap between sampler and trainer is that of the same weights; older weights give a drift."""
    run = tmp_path / "run"
    train(TrainConfig(**(lagged | {"steps": 3, "lag": 1, "minibatches": 2, "lr": 1e-2, "out": str(run)})))
    first, *_, last = lines(run)
    assert first["sampler_gap"] < 1e-4
    assert "sampler_gap" not in last
    assert last["sampler_drift"] > 1e-3


def test_rows_that_are_too_old_leave(lagged, tmp_path):
    with pytest.raises(InputError, match="allow at least 4"):
        train(TrainConfig(**(lagged | {"lag": 2, "minibatches": 2, "max_staleness": 3, "out": str(tmp_path / "x")})))
    run = tmp_path / "run"
    train(TrainConfig(**(lagged | {"steps": 3, "lag": 2, "minibatches": 2, "max_staleness": 4, "out": str(run)})))
    assert [line["dropped_stale"] for line in lines(run)] == [{"sum": 0, "count": 16}] * 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"lag": 1, "algorithm": "sft", "task": "addition", "group_size": 1}, "demonstrations"),
        ({"sampler_noise": "fp8"}, "bf16, or temperature=X"),
        ({"lag": -1}, "--lag"),
        ({"max_staleness": -1}, "--max-staleness"),
    ],
)
def test_what_has_no_effect_is_refused(change, what, lagged, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(lagged | {"settings": {}, "out": str(tmp_path / "x")} | change)))


def test_a_run_says_what_does_not_allow_for_old_samples(lagged, tmp_path, capsys):
    for name, told in (("grpo", True), ("m2po", False)):
        options = lagged | {"algorithm": name, "settings": {}, "lag": 1, "steps": 1, "quiet": False}
        train(TrainConfig(**(options | {"out": str(tmp_path / name)})))
        assert ("stale samples: grpo compares with π_old" in capsys.readouterr().err) is told
