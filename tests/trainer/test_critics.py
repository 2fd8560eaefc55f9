"""Runs with a critic on the policy's trunk: it learns, is saved, and goes on bit for bit."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kenpo.errors import InputError
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config


@pytest.fixture
def valued(options):
    return options | {"algorithm": "ppo", "settings": {}, "eval_problems": 0, "record_batches": True}


def head(run, step=-1):
    return load_file(str(sorted((run / "checkpoints").glob("step_*"))[step] / "scalar_heads.safetensors"))


def figures(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_the_head_learns_and_the_next_batch_reads_what_it_says(name, valued, tmp_path):
    run = tmp_path / name
    train(TrainConfig(**(valued | {"algorithm": name, "out": str(run), "steps": 4, "critic_lr": 0.05})))
    assert bool(head(run)["values.weight"].any())
    first, last = (load_file(str(run / f"batches/{n:06d}.safetensors")) for n in (1, 4))
    assert not bool(first["values_old"].any())  # a fresh head says 0
    assert bool(last["values_old"][last["mask"]].any())
    assert not bool(last["values_old"][~last["mask"]].any())
    lines = [line for line in figures(run) if line["step"]]
    assert all(math.isfinite(line["explained_variance"]["sum"]) for line in lines)
    assert all(line["value_loss"]["sum"] > 0 for line in lines)


def test_the_heads_rate_is_its_own(valued, tmp_path):
    for rate in (1e-3, 1e-1):
        train(TrainConfig(**(valued | {"out": str(tmp_path / str(rate)), "steps": 2, "critic_lr": rate})))
    slow, quick = (head(tmp_path / str(rate))["values.bias"].abs() for rate in (1e-3, 1e-1))
    assert float(quick) > 20 * float(slow)


def test_a_run_with_a_critic_goes_on_bit_for_bit(valued, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(valued | {"out": str(run), "steps": 4, "keep": 0})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    name = "checkpoints/step_000004/model.safetensors"
    one, two = (load_file(str(run / name)) | head(run) for run in (whole, cut))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_two_processes_give_the_run_of_one(valued, tmp_path, spawn):
    options = {**valued, "steps": 2, "out": str(tmp_path / "one"), "dtype": "float64"}
    train(TrainConfig(**options))
    from kenpo.trainer.config import to_dict

    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29653")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (head(tmp_path / run) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"algorithm": "grpo", "critic": "trunk"}, "no stage of 'grpo' reads values"),
        ({"algorithm": "grpo", "critic_lr": 0.1}, "no stage of 'grpo' reads values"),
        ({"critic": "some/model"}, "not there yet"),
    ],
)
def test_a_critic_that_nothing_reads_is_refused(change, what, valued, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(valued | {"out": str(tmp_path / "x")} | change)))
