"""Runs with a critic, on the policy's trunk or a model of its own: it learns, is saved, goes on bit for bit."""

import json
import math
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from kenpo.errors import IllegalCombinationError, InputError
from kenpo.trainer.config import TrainConfig, to_dict
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
    begun = first["values_old"][first["mask"]]  # a fresh head begins at the mean reward of the first batch
    assert begun.tolist() == pytest.approx([float(first["rewards"].mean())] * len(begun), rel=1e-6)
    assert float(last["values_old"][last["mask"]].std()) > 0
    assert bool(last["values_old"][last["mask"]].any())
    assert not bool(last["values_old"][~last["mask"]].any())
    lines = [line for line in figures(run) if line["step"]]
    assert all(math.isfinite(line["explained_variance"]["sum"]) for line in lines)
    assert all(line["value_loss"]["sum"] > 0 for line in lines)


def test_the_heads_rate_is_its_own(valued, tmp_path):
    for rate in (1e-3, 1e-1):
        train(TrainConfig(**(valued | {"out": str(tmp_path / str(rate)), "steps": 1, "critic_lr": rate})))
    begun = float(load_file(str(tmp_path / "0.1/batches/000001.safetensors"))["rewards"].mean())
    slow, quick = ((head(tmp_path / str(rate))["values.bias"] - begun).abs() for rate in (1e-3, 1e-1))
    assert float(quick) > 20 * float(slow)


def weights(checkpoint):
    """Every tensor that a checkpoint holds, by the file it lies in."""
    files = sorted(p for p in checkpoint.rglob("*.safetensors"))
    return {f"{p.relative_to(checkpoint)}:{n}": t for p in files for n, t in load_file(str(p)).items()}


def same(one, two, exact=True):
    assert one.keys() == two.keys()
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    return [n for n in one if not n.endswith("rng.torch") and not close(one[n], two[n])]


@pytest.fixture(params=["trunk", "own", "own-lora"])
def critic(request, valued, models):
    """Options of a run with each kind of critic."""
    if request.param == "trunk":
        return valued
    adapter = {"lora_rank": 2} if request.param == "own-lora" else {}
    return valued | {"critic": str(models / "llama"), "critic_warmup": 1} | adapter


def test_a_run_with_a_critic_goes_on_bit_for_bit(critic, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(critic | {"out": str(run), "steps": 4, "keep": 0, "minibatches": 2})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = (weights(run / "checkpoints/step_000004") for run in (whole, cut))
    assert same(one, two) == []
    assert any(n.startswith("critic/") for n in one) == ("critic" in critic)


@pytest.mark.parametrize("kind", ["trunk", "own"])
def test_a_killed_run_goes_on_bit_for_bit(kind, valued, models, tmp_path, spawn):
    options = valued | ({"critic": str(models / "llama"), "critic_warmup": 1} if kind == "own" else {})
    options |= {"checkpoint_every": 1, "keep": 0, "steps": 5}
    train(TrainConfig(**(options | {"out": str(tmp_path / "whole")})))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "whole"))))
    cut = tmp_path / "cut"
    process = spawn("train", "--config", config, "--out", cut)
    deadline = time.monotonic() + 120
    while not (cut / "checkpoints/step_000002").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = (weights(tmp_path / run / "checkpoints/step_000005") for run in ("whole", "cut"))
    assert same(one, two) == []


@pytest.mark.parametrize(("kind", "port"), [("trunk", 29653), ("own", 29654)])
def test_two_processes_give_the_run_of_one(kind, port, valued, models, tmp_path, spawn):
    options = {**valued, "steps": 2, "out": str(tmp_path / "one"), "dtype": "float64"}
    options |= {"critic": str(models / "llama"), "minibatches": 2} if kind == "own" else {}
    train(TrainConfig(**options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (weights(tmp_path / run / "checkpoints/step_000002") for run in ("one", "two"))
    learnt = [n for n in one if "optimizer" not in n]
    assert same({n: one[n] for n in learnt}, {n: two[n] for n in learnt}, exact=False) == []
    assert any(n.startswith("critic/scalar_heads") for n in learnt) == (kind == "own")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "port"), [("trunk", 29655), ("own", 29657)])
def test_two_killed_processes_go_on_bit_for_bit(kind, port, valued, models, tmp_path, spawn):
    options = valued | ({"critic": str(models / "llama"), "critic_warmup": 1} if kind == "own" else {})
    options |= {"checkpoint_every": 1, "keep": 0, "steps": 5, "out": str(tmp_path / "unused")}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(TrainConfig(**options))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert spawn("train", "--config", config, "--out", whole, launcher=(*launcher, str(port))).wait(200) == 0
    process = spawn("train", "--config", config, "--out", cut, launcher=(*launcher, str(port + 1)))
    deadline = time.monotonic() + 200
    while not (cut / "checkpoints/step_000002").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    for pid in [process.pid, *map(int, children.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    resumed = spawn("train", "--resume", cut, launcher=(*launcher, str(port)))
    _, err = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, err[-2000:]
    one, two = (weights(run / "checkpoints/step_000005") for run in (whole, cut))
    assert same(one, two) == []


@pytest.mark.parametrize("kind", ["trunk", "own"])
def test_the_critic_learns_alone_at_first(kind, valued, models, tmp_path):
    options = valued | {"steps": 3, "critic_warmup": 2, "checkpoint_every": 1, "keep": 0, "out": str(tmp_path / "run")}
    train(TrainConfig(**(options | ({"critic": str(models / "llama")} if kind == "own" else {}))))
    start = load_file(str(models / "qwen3/model.safetensors"))
    after = [weights(tmp_path / f"run/checkpoints/step_{n:06d}") for n in (1, 2, 3)]
    policy = [{n.partition(":")[2]: t for n, t in w.items() if n.startswith("model.safetensors")} for w in after]
    assert all(torch.equal(policy[1][n], t) for n, t in start.items())
    assert not all(torch.equal(policy[2][n], t) for n, t in start.items())
    moments = [n for n in after[1] if n.startswith("trainer/") and "exp_avg" in n and "scalar_heads" not in n]
    assert moments == []  # those of a policy that rests rest too
    where = "critic/scalar_heads" if kind == "own" else "scalar_heads"
    learnt = [next(t for n, t in w.items() if n.startswith(where) and n.endswith("values.weight")) for w in after]
    assert bool(learnt[0].any())
    assert not torch.equal(learnt[0], learnt[1])
    assert [line["updates"] for line in figures(tmp_path / "run") if line["step"]] == [0, 0, 1]


def test_a_critic_that_was_saved_begins_where_it_was(valued, models, tmp_path):
    """A head that lies in the model's folder is taken up as it is, on a trunk and apart."""
    train(TrainConfig(**(valued | {"out": str(tmp_path / "first"), "steps": 2, "critic_lr": 0.05})))
    folder = tmp_path / "first/checkpoints/step_000002"
    for name, where in (("trunk", {"model": str(folder)}), ("own", {"critic": str(folder)})):
        train(TrainConfig(**(valued | where | {"out": str(tmp_path / name), "steps": 1, "critic_lr": 0.0})))
        part = "critic/" if name == "own" else ""
        saved = load_file(str(tmp_path / name / "checkpoints/step_000001" / f"{part}scalar_heads.safetensors"))
        assert all(torch.equal(t, head(tmp_path / "first")[n]) for n, t in saved.items())


def test_a_copy_of_the_policy_begins_as_the_policy_and_stays_apart(valued, models, tmp_path):
    train(TrainConfig(**(valued | {"critic": "copy", "critic_lr": 0.0, "steps": 2, "out": str(tmp_path / "run")})))
    start = load_file(str(models / "qwen3/model.safetensors"))
    held = weights(tmp_path / "run/checkpoints/step_000002")
    assert all(torch.equal(held[f"critic/model.safetensors:{n}"], t) for n, t in start.items())
    assert not all(torch.equal(held[f"model.safetensors:{n}"], t) for n, t in start.items())
    before = weights(tmp_path / "run/checkpoints/step_000002")
    (tmp_path / "run/summary.json").unlink()
    train(recorded_config(tmp_path / "run").but(out=str(tmp_path / "run"), resume=True, quiet=True))
    assert same(before, weights(tmp_path / "run/checkpoints/step_000002")) == []


def test_the_plan_says_who_predicts_values_and_what_it_costs(valued, models, tmp_path):
    options = valued | {"dry_run": True, "out": str(tmp_path / "x")}
    trunk, own = (
        train(TrainConfig(**(options | more)))["plan"] for more in ({}, {"critic": "copy", "critic_warmup": 2})
    )
    assert "yes  a head on the policy's trunk; asked" in trunk
    assert "yes  a model of its own: copy, which learns alone in the first 2 step(s)" in own
    assert "  critic\n" in own
    assert "  critic\n" not in trunk
    assert "no   no stage reads values" in train(TrainConfig(**(options | {"algorithm": "grpo"})))["plan"]


def test_a_value_loss_sends_nothing_to_a_policy_with_a_critic_of_its_own(valued, models, tmp_path):
    """The policy after three steps is bit for bit that of a run whose value loss is a hundred times as large."""
    runs = []
    for name, coef in (("small", 0.1), ("large", 10.0)):
        out = tmp_path / name
        more = {"critic": str(models / "llama"), "out": str(out), "steps": 1, "grad_clip": 0.0}
        train(TrainConfig(**(valued | more | {"settings": {"regularizers.value_loss.coef": coef}})))
        runs.append(load_file(str(out / "checkpoints/step_000001/model.safetensors")))
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


def test_a_critic_starts_from_the_head_that_lies_in_its_folder_and_a_frozen_one_stays(valued, models, tmp_path):
    """rfpo judges by a critic that was trained before, and never moves it."""
    train(TrainConfig(**(valued | {"critic": str(models / "llama"), "out": str(tmp_path / "ppo"), "steps": 2})))
    trained = tmp_path / "ppo/checkpoints/step_000002/critic"
    options = valued | {"algorithm": "rfpo", "critic": str(trained), "steps": 2, "out": str(tmp_path / "rfpo")}
    train(TrainConfig(**(options | {"settings": {"shaping.critic_verdict.tau": -10.0}})))
    batch = load_file(str(tmp_path / "rfpo/batches/000001.safetensors"))
    assert bool(batch["score_old"].all())
    assert bool(batch["values_old"][batch["mask"]].any())
    assert not (tmp_path / "rfpo/checkpoints/step_000002/critic").exists()
    with pytest.raises(InputError, match="holds no head for values"):
        train(TrainConfig(**(options | {"critic": str(models / "llama"), "out": str(tmp_path / "x")})))


def test_the_value_after_a_cut_response_is_the_critics(valued, models, tmp_path):
    """V after the last token is V before a token that would follow it."""
    from kenpo.experience.addition import character_tokenizer
    from kenpo.learner.critic import Critic
    from kenpo.learner.learner import Learner
    from kenpo.models.loading import load_model
    from kenpo.models.scorer import Scorer
    from kenpo.models.value_head import new_heads
    from kenpo.types import Rollouts

    model, _ = load_model(str(models / "qwen3"), dtype="float64", device="cpu")
    learner = Learner(Scorer(model, heads=new_heads(model, ("values",), seed=3)))
    ids = character_tokenizer()("12+34=46", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*ids[:-1], -1], ids])
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[0, 3:-1] = mask[1, 3:] = True
    batch = Rollouts(tokens=tokens, mask=mask, group=torch.tensor([0, 1]), rewards=torch.zeros(2))
    seen = Critic(learner).look(frozenset({"values_old", "score_old"}), batch, [0, 1], {})
    assert float(seen.score_old[0]) == pytest.approx(float(seen.values_old[1, -1]), abs=1e-12)
    assert float(seen.score_old[0]) != 0
    options = valued | {"settings": {"advantage.terminal": "truncated"}, "steps": 1, "out": str(tmp_path / "run")}
    train(TrainConfig(**options))
    assert "score_old" in load_file(str(tmp_path / "run/batches/000001.safetensors"))


def test_a_kl_in_the_reward_is_charged_with_one_update_and_not_twice(valued, tmp_path):
    train(TrainConfig(**(valued | {"steps": 3, "out": str(tmp_path / "run"), "lr": 0.05})))
    batch = load_file(str(tmp_path / "run/batches/000003.safetensors"))
    assert not torch.equal(batch["logp_old"], batch["logp_ref"])  # both passes ran, though one update takes the batch
    with pytest.raises(IllegalCombinationError, match="both"):
        train(TrainConfig(**(valued | {"stages": ("kl_to_reference",), "out": str(tmp_path / "x")})))
    assert not (tmp_path / "x").exists()
    meant = {"stages": ("kl_to_reference",), "settings": {"advantage.both": True}, "steps": 1}
    train(TrainConfig(**(valued | meant | {"out": str(tmp_path / "both")})))
    line = [x for x in figures(tmp_path / "both") if x["step"]][-1]
    assert {"value_loss", "kl_to_reference"} <= line.keys()


def test_figures_of_the_critic(valued, models, tmp_path):
    options = valued | {"critic": str(models / "llama"), "out": str(tmp_path / "run"), "steps": 2, "epochs": 2}
    train(TrainConfig(**(options | {"critic_lr": 0.05, "settings": {"regularizers.value_loss.clip": 0.01}})))
    line = [x for x in figures(tmp_path / "run") if x["step"]][-1]
    batch = load_file(str(tmp_path / "run/batches/000002.safetensors"))
    assert sum(line[f"values/{n}of4"]["count"] for n in (1, 2, 3, 4)) == int(batch["mask"].sum())
    total = sum(line[f"values/{n}of4"]["sum"] for n in (1, 2, 3, 4))
    assert total == pytest.approx(float(batch["values_old"][batch["mask"]].double().sum()), rel=1e-6)
    assert 0 < line["value_loss_clipped"]["sum"] / line["value_loss_clipped"]["count"] <= 1
    assert line["critic_grad_norm"]["count"] == 2


def test_an_adapter_alone_in_the_checkpoint_goes_for_the_critic_too(valued, models, tmp_path):
    more = {"critic": str(models / "llama"), "lora_rank": 2, "save_adapter": True, "out": str(tmp_path / "run")}
    train(TrainConfig(**(valued | more | {"steps": 2, "checkpoint_every": 1, "keep": 0})))
    folder = tmp_path / "run/checkpoints/step_000002/critic"
    assert not (folder / "model.safetensors").exists()
    assert (folder / "trainer/adapter/adapter_model.safetensors").is_file()
    before = weights(tmp_path / "run/checkpoints/step_000002")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000002")
    (tmp_path / "run/summary.json").unlink()
    train(recorded_config(tmp_path / "run").but(out=str(tmp_path / "run"), resume=True, quiet=True))
    assert same(before, weights(tmp_path / "run/checkpoints/step_000002")) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"algorithm": "grpo", "critic": "trunk"}, "no stage of 'grpo' reads values"),
        ({"algorithm": "grpo", "critic_lr": 0.1}, "no stage of 'grpo' reads values"),
        ({"algorithm": "grpo", "critic_warmup": 1}, "no stage of 'grpo' reads values"),
        ({"critic": "some/model"}, "some/model: no such folder"),
        ({"critic_warmup": 6}, "the policy would never learn"),
        ({"algorithm": "rfpo"}, "reads a critic that never learns"),
        ({"algorithm": "rfpo", "critic": "a/b", "critic_lr": 0.1}, "the critic of 'rfpo' never learns"),
    ],
)
def test_a_critic_that_can_not_be_is_refused(change, what, valued, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(valued | {"out": str(tmp_path / "x")} | change)))
