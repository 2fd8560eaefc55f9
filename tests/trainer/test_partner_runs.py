"""Runs of two policies that exchange groups."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kenpo
from kenpo.batches import load_rollouts
from kenpo.errors import InputError, RunError
from kenpo.experience.partner import Exchange, received
from kenpo.experience.source import Collected
from kenpo.learner.minibatches import minibatches
from kenpo.trainer.config import TrainConfig, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config
from kenpo.types import Rollouts


@pytest.fixture
def paired(options, models):
    return options | {
        "algorithm": "graft", "settings": {"weights.compatibility.threshold": 0.0}, "partner": str(models / "llama"),
        "prompts": 8, "group_size": 3, "steps": 2, "correct_at": 0.9, "eval_problems": 4, "record_batches": True,
    }  # fmt: skip


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def batch(run, step=1):
    return load_rollouts(run / f"batches/{step:06d}.safetensors")


def both(run, step):
    folder = run / f"checkpoints/step_{step:06d}"
    own, peer = load_file(str(folder / "model.safetensors")), load_file(str(folder / "partner/model.safetensors"))
    return own | {f"partner.{n}": v for n, v in peer.items()}


def logps(model, tokens, mask):
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    ids = tokens[tokens >= 0][None]
    with torch.no_grad():
        found = net(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return found[mask[: ids.shape[1]][1:]]


def test_what_one_solved_and_the_other_did_not_goes_over(paired, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(paired | {"out": str(run), "dtype": "float64", "steps": 1})))
    got, line = batch(run), lines(run)[1]
    theirs = got.logp_source.isfinite()
    assert line["received"] == {"sum": len(got.group[theirs].unique()), "count": 8}
    assert line["received"]["sum"] > 0
    assert got.group[~theirs].tolist() == [g for g in range(8) for _ in range(3)]
    assert int(got.group[theirs].min()) >= 8
    for group in got.group[theirs].unique().tolist():
        rows = got[got.group == group]
        mine = got[(got.prompt_id == rows.prompt_id[0]) & ~theirs]
        assert int((mine.rewards >= 0.9).sum()) == 0
        assert 0 < int((rows.rewards >= 0.9).sum()) < 3
        for r in range(3):
            wrote = logps(paired["partner"], rows.tokens[r], rows.mask[r])
            reads = logps(paired["model"], rows.tokens[r], rows.mask[r])
            assert torch.allclose(rows.logp_sampler[r][rows.mask[r]], wrote, atol=1e-9)
            assert float(rows.logp_source[r]) == pytest.approx(float(wrote.mean()))
            assert torch.allclose(rows.logp_old[r][rows.mask[r]], reads, atol=1e-9)
    advantages = kenpo.prepare(kenpo.get("graft"), got).advantages
    rows = (got.group == int(got.group.max())).nonzero().flatten()
    alone = kenpo.prepare(kenpo.get("graft"), got[rows].replace(group=torch.zeros(3, dtype=torch.int64))).advantages
    assert torch.equal(advantages[rows], alone)


def test_both_learn_and_are_measured(paired, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(paired | {"out": str(run)})))
    after = both(run, 2)
    for name, model in (("", paired["model"]), ("partner.", paired["partner"])):
        before = load_file(f"{model}/model.safetensors")
        assert any(not torch.equal(before[n], after[name + n]) for n in before)
    start, *steps = lines(run)
    assert {"eval/accuracy", "partner/eval/accuracy"} <= start.keys()
    for line in steps:
        assert line["updates"] == 1 + (line["received"]["sum"] > 0)
        assert line["partner/updates"] == 1 + (line["partner/received"]["sum"] > 0)
        own = batch(run, line["step"])
        assert line["kl_sampler"]["count"] in (0, int(own.mask[own.logp_source.isnan()].sum()))
        assert line["tokens"]["generated"] == int(own.mask[own.logp_source.isnan()].sum())
        assert line["tokens"]["filtered"] == 0
    asked = [r["problem"] for r in lines(run, "samples.jsonl") if r["step"] == 1 and "policy" not in r]
    others = [r["problem"] for r in lines(run, "samples.jsonl") if r["step"] == 1 and r.get("policy") == "partner"]
    assert asked == others


def test_two_copies_of_one_model_sample_differently(paired, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(paired | {"out": str(run), "partner": paired["model"], "steps": 1})))
    records = lines(run, "samples.jsonl")
    mine = [r["completion"] for r in records if "policy" not in r]
    theirs = [r["completion"] for r in records if r.get("policy") == "partner"]
    assert len(mine) == len(theirs) == 24
    assert sum(a == b for a, b in zip(mine, theirs, strict=True)) < 12


def rollouts(rewards, first=0, source=None, logp=-1.0):
    """Groups of two; the rewards of each."""
    flat = [r for pair in rewards for r in pair]
    n = len(flat)
    return Rollouts(
        mask=torch.tensor([[False, True, True]] * n), group=torch.arange(n) // 2, rewards=torch.tensor(flat),
        prompt_id=torch.arange(n) // 2 + first, tokens=torch.ones(n, 3, dtype=torch.int64),
        logp_sampler=torch.tensor([[9.0, logp, 3 * logp]] * n),
    )  # fmt: skip


class Fixed:
    headline, heldout = "eval/accuracy", 1

    def __init__(self, batch):
        self.batch = batch

    def next(self, step, state, priorities=None, usable=None):
        return Collected(self.batch, state=step)

    def measure(self, score):
        return {"eval/accuracy": 1}


def test_groups_go_both_ways_and_states_are_kept_apart():
    a, b = rollouts([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]), rollouts([(0.0, 1.0), (0.0, 0.0), (0.0, 0.0)], logp=-2.0)
    seen, told = [], []
    source = Exchange(
        Fixed(a), Fixed(b), 2, 1.0, lambda batch, step: seen.append((batch, step)) or {"updates": 2}, told.append
    )
    got = source.next(4, {"version": 5})
    assert told == [5]
    assert got.state == {"own": 4, "peer": 4, "version": 7}
    assert got.figures["received"]["sum"] == got.figures["partner/received"]["sum"] == 1
    assert got.figures["partner/updates"] == 2
    ((theirs, step),) = seen
    assert step == 4
    assert got.rollouts.rewards.tolist()[6:] == [0.0, 1.0]
    assert got.rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert got.rollouts.logp_source.isnan().tolist() == [True] * 6 + [False] * 2
    assert got.rollouts.logp_source.tolist()[6:] == [-4.0, -4.0]
    assert theirs.rewards.tolist()[6:] == [1.0, 0.0]
    assert theirs.logp_source.tolist()[6:] == [-2.0, -2.0]
    assert source.measure(None) == {"eval/accuracy": 1, "partner/eval/accuracy": 1}
    with pytest.raises(RunError, match="different problems"):
        Exchange(Fixed(a), Fixed(rollouts([(0.0, 1.0)] * 3, first=5)), 2, 1.0, lambda batch, step: {}, print).next(
            1, None
        )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_partners_minibatches_come_last(number):
    own, other = rollouts([(1.0, 0.0)] * 6), rollouts([(1.0, 0.0)] * 3)
    prepared = kenpo.prepare(kenpo.get("graft"), received(own, other, [0, 2, 1]))
    parts = minibatches(prepared.rollouts, number, 0, 1, 0)
    assert sorted(r for rows in parts for r in rows) == list(range(18))
    kinds = [{math.isnan(prepared.rollouts.logp_source[r]) for r in rows} for rows in parts]
    assert kinds == [{True}] * number + [{False}] * math.ceil(number / 2)
    assert all(len(rows) % 2 == 0 for rows in parts)


def test_such_a_run_goes_on_bit_for_bit(paired, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(paired | {"out": str(run), "steps": 4, "keep": 0, "minibatches": 2})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = both(whole, 4), both(cut, 4)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert torch.equal(batch(whole, 4).policy_version, batch(cut, 4).policy_version)


def test_two_processes_give_the_run_of_one(paired, tmp_path, spawn):
    train(TrainConfig(**(paired | {"out": str(tmp_path / "one"), "dtype": "float64"})))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29675")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (both(tmp_path / run, 2) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"partner": None}, "name it: --partner MODEL"),
        ({"algorithm": "grpo", "settings": {}}, "no stage of 'grpo' reads another policy's groups"),
        ({"lora_rank": 2}, "--lora-rank: not beside --partner"),
        ({"rephrase": True}, "--rephrase: not beside --partner"),
        ({"stages": ("drop_uniform_groups",)}, "selects groups"),
    ],
)
def test_what_can_not_stand_beside_a_partner_is_refused(change, what, paired, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(paired | change | {"out": str(tmp_path / "x")})))
    assert not (tmp_path / "x").exists()
