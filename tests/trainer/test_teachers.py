"""Distilling runs: the teacher is asked, resumes and is refused where it can't teach."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kenpo.errors import InputError
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config


@pytest.fixture
def taught(options, models):
    return options | {"teacher": str(models / "llama"), "eval_problems": 0, "settings": {}}


def weights(run):
    return load_file(str(sorted((run / "checkpoints").glob("step_*"))[-1] / "model.safetensors"))


@pytest.mark.parametrize("name", ["opd", "gkd", "teacher_mixed"])
def test_a_teacher_moves_the_policy_and_its_log_probs_are_recorded(name, taught, tmp_path):
    out = tmp_path / name
    train(TrainConfig(**(taught | {"algorithm": name, "out": str(out), "steps": 2, "record_batches": True})))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["grad_norm"]["sum"] > 0 for line in lines if line["step"])
    if name != "gkd":
        batch = load_file(str(out / "batches/000001.safetensors"))
        mask = batch["mask"]
        gap = (batch["logp_teacher"] - batch["logp_sampler"])[mask]
        assert bool(gap.abs().max() > 0.1)


def test_a_run_with_a_teacher_goes_on_bit_for_bit(taught, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = taught | {"algorithm": "teacher_mixed", "checkpoint_every": 2}
    train(TrainConfig(**(options | {"out": str(whole), "steps": 4, "keep": 0})))
    train(TrainConfig(**(options | {"out": str(cut), "steps": 4, "keep": 0})))
    import shutil

    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = weights(whole), weights(cut)
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_the_policy_without_its_adapter_teaches(options, tmp_path):
    pytest.importorskip("peft")
    out = tmp_path / "base"
    more = {"algorithm": "opd", "teacher": "base", "lora_rank": 2, "out": str(out), "steps": 3, "eval_problems": 0}
    train(TrainConfig(**(options | more | {"settings": {}, "record_batches": True})))
    first, last = (load_file(str(out / f"batches/{n:06d}.safetensors")) for n in (1, 3))
    gaps = [(b["logp_teacher"] - b["logp_old"])[b["mask"]].abs().max() for b in (first, last)]
    assert float(gaps[0]) < 1e-5  # the adapter changes nothing yet: the teacher is the policy
    assert float(gaps[1]) < 1e-5  # and a policy that its teacher equals does not move


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"teacher": None}, "name the teacher"),
        ({"algorithm": "grpo"}, "no stage of 'grpo' reads a teacher"),
        ({"teacher": "base"}, "no adapter to leave off"),
        ({"teacher": "hint"}, "hint"),
        ({"teacher": "no/such/place"}, "no such"),
    ],
)
def test_what_cannot_teach_is_refused_before_the_run_exists(change, what, taught, tmp_path):
    config = taught | {"algorithm": "opd", "out": str(tmp_path / "x")} | change
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**config))
    assert not (tmp_path / "x").exists()
