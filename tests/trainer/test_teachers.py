"""Distilling runs: the teacher is asked, resumes and is refused where it can't teach."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kenpo.errors import InputError
from kenpo.trainer.config import TrainConfig, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config


@pytest.fixture
def taught(options, models):
    return options | {"teacher": str(models / "llama"), "eval_problems": 0, "settings": {}}


def load_policy(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


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


def test_a_teacher_with_another_template_reads_the_students_own_tokens(taught, models, tmp_path):
    """A teacher's own chat template renders nothing: it scores the ids that the policy saw and sampled."""
    from transformers import AutoTokenizer

    folder, out = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(models / "llama", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}1{{ m['content'] }}+{% endfor %}"
    tokenizer.save_pretrained(folder)
    train(TrainConfig(**(taught | {"algorithm": "opd", "teacher": str(folder), "out": str(out), "steps": 1})))
    batch = load_file(str(out / "batches/000001.safetensors"))
    ids, mask = batch["tokens"].long().clamp_min(0), batch["mask"].bool()
    with torch.no_grad():
        logp = load_policy(folder)(input_ids=ids).logits[:, :-1].log_softmax(-1)
    want = torch.cat([logp[:, :1, 0] * 0, logp.gather(-1, ids[:, 1:, None]).squeeze(-1)], 1)
    assert (batch["logp_teacher"] - want)[mask].abs().max() < 1e-5


def test_a_run_with_a_teacher_goes_on_bit_for_bit(taught, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = taught | {"algorithm": "teacher_mixed", "checkpoint_every": 2}
    train(TrainConfig(**(options | {"out": str(whole), "steps": 4, "keep": 0})))
    train(TrainConfig(**(options | {"out": str(cut), "steps": 4, "keep": 0})))
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


HINTED = {"teacher": "hint", "hint_column": "hint", "minibatches": 2, "max_tokens": 8}


@pytest.mark.parametrize("name", ["sdpo", "opsd", "teacher_mixed", "sdpo-sampled"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_hinted_policy_teaches_and_goes_on_bit_for_bit(name, rank, taught, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = taught | HINTED | {"algorithm": name, "steps": 4, "keep": 0, "lora_rank": rank, "record_batches": True}
    for run in (whole, cut):
        train(TrainConfig(**(options | {"out": str(run)})))
    batch = load_file(str(whole / "batches/000001.safetensors"))
    assert bool(batch["hinted"].all())
    assert bool((batch["contexts.hint"] >= 0).any(1).all())
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(line["grad_norm"]["sum"] > 0 and line["hinted"] == {"sum": 12, "count": 12} for line in lines)
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    name = "checkpoints/step_000004/trainer/optimizer.safetensors"
    one, two = (load_file(str(run / name)) | weights(run) for run in (whole, cut))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_the_hint_is_left_out_of_what_is_trained(taught, tmp_path):
    """π_old and the sampler read the plain prompt; only the teacher read the other one."""
    out = tmp_path / "run"
    more = HINTED | {"algorithm": "teacher_mixed", "out": str(out), "steps": 1, "record_batches": True}
    train(TrainConfig(**(taught | more)))
    batch = load_file(str(out / "batches/000001.safetensors"))
    mask = batch["mask"]
    assert torch.allclose(batch["logp_old"][mask], batch["logp_sampler"][mask], atol=1e-4)
    assert float((batch["logp_teacher"] - batch["logp_old"])[mask].abs().max()) > 1e-2


def test_peers_are_the_hints_of_sdpo(taught, tmp_path):
    out = tmp_path / "run"
    more = {"algorithm": "sdpo", "teacher": "hint", "out": str(out), "steps": 1, "record_batches": True}
    train(TrainConfig(**(taught | more | {"settings": {"weights.hinted.threshold": 0.9}})))
    batch = load_file(str(out / "batches/000001.safetensors"))
    for group in batch["group"].unique():
        rows = batch["group"] == group
        good = (batch["rewards"][rows] >= 0.9).long()
        want = [bool((good.sum() - good[i]) > 0) for i in range(int(rows.sum()))]
        assert batch["hinted"][rows].tolist() == want


def test_an_average_that_follows_at_once_is_the_policy_itself(taught, tmp_path):
    """Rate 1 reads the live policy; a rate of nearly 1 must say nearly the same, and both differ from rate 0."""
    found = {}
    for rate in (0.0, 0.9999999, 1.0):
        out = tmp_path / str(rate)
        settings = {"weights.hinted.average": rate}
        options = taught | HINTED | {"algorithm": "sdpo", "settings": settings, "out": str(out), "steps": 3}
        train(TrainConfig(**options))
        found[rate] = torch.cat([t.flatten() for t in weights(out).values()])
    assert torch.allclose(found[1.0], found[0.9999999], atol=1e-5)
    assert not torch.allclose(found[1.0], found[0.0], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "measured"),
    [({}, True), (HINTED, True), ({"teacher": "hint", "algorithm": "sdpo"}, False)],
    ids=["another model", "a column", "peers"],
)
def test_figures_of_the_teacher(change, measured, taught, tmp_path):
    """Its own accuracy once, before the first step; how far it and the policy agree, at every step."""
    out = tmp_path / "run"
    options = taught | {"algorithm": "opd", "eval_problems": 8, "steps": 2, "out": str(out)} | change
    train(TrainConfig(**(options | {"settings": {"weights.hinted.threshold": 0.0}} if not measured else options)))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert ("teacher/accuracy" in lines[0]) is measured
    assert not measured or lines[0]["teacher/accuracy"]["count"] == 8
    for line in lines[1:]:
        n = line["tokens"]["trained"]
        assert 0 <= line["teacher/agrees"]["sum"] <= line["teacher/agrees"]["count"] == n
        assert line["teacher/kl"]["count"] == n == sum(line[f"teacher/kl/{q}"]["count"] for q in (1, 2, 3, 4))
        assert "teacher/accuracy" not in line


def test_two_processes_give_the_run_of_one_under_hints(taught, tmp_path, spawn):
    options = taught | HINTED | {"algorithm": "sdpo", "steps": 2, "dtype": "float64", "out": str(tmp_path / "one")}
    train(TrainConfig(**options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29657")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (weights(tmp_path / run) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)


def test_minillm_samples_from_the_mixture(taught, tmp_path):
    out = tmp_path / "run"
    train(TrainConfig(**(taught | {"algorithm": "minillm", "out": str(out), "steps": 2, "record_batches": True})))
    batch, line = (
        load_file(str(out / "batches/000001.safetensors")),
        json.loads((out / "metrics.jsonl").read_text().splitlines()[0]),
    )
    mask = batch["mask"]
    assert "sampler_gap" not in line  # the mixture is no fault of the sampler
    policy = load_policy(taught["model"])
    tokens = batch["tokens"]
    for row in range(len(tokens)):
        ids = tokens[row][tokens[row] >= 0]
        p, q = (
            torch.cat(
                [torch.zeros(1), m(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]]
            )
            for m in (policy, load_policy(taught["teacher"]))
        )
        mixed = torch.logaddexp(p + math.log(0.8), q + math.log(0.2)).detach()
        at = mask[row][: len(ids)]
        assert torch.allclose(batch["logp_sampler"][row][: len(ids)][at], mixed[at], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"teacher": None}, "name the teacher"),
        ({"algorithm": "grpo"}, "no stage of 'grpo' reads a teacher"),
        ({"teacher": "base"}, "no adapter to leave off"),
        ({"teacher": "hint", "hint_column": "nowhere"}, "no hint in column 'nowhere'"),
        ({"teacher": "hint", "hint_template": "{prompt}"}, "hint-template"),
        ({"hint_column": "hint"}, "--hint-column 'hint'"),
        ({"algorithm": "minillm", "teacher": "hint"}, "mixture"),
        ({"algorithm": "opsd"}, "shown a hint: --teacher hint"),
        ({"algorithm": "sdpo", "teacher": "hint", "group_size": 1}, "another sample of the group"),
        ({"teacher": "no/such/place"}, "no such"),
    ],
)
def test_what_cannot_teach_is_refused_before_the_run_exists(change, what, taught, tmp_path):
    config = taught | {"algorithm": "opd", "out": str(tmp_path / "x")} | change
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**config))
    assert not (tmp_path / "x").exists()
