"""Runs on pairs: every pairwise algorithm, what is kept of the reference, resuming, ranks, and what is refused."""

import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kenpo
from kenpo.batches import load_rollouts
from kenpo.errors import InputError
from kenpo.experience.pairs import PairStream, bundled_pairs
from kenpo.experience.preferences import PairOptions, Pairs
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.learner.preferences import pair_figures
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.models.value_head import new_heads
from kenpo.trainer.config import TrainConfig, resolve, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config

NAMES = ("reward_model", "dpo", "dpo-conservative", "dpo-robust", "ipo", "ipo-normalised", "simpo", "mdre")


@pytest.fixture
def paired(models):
    return {
        "model": str(models / "qwen3"), "algorithm": "dpo", "steps": 4, "prompts": 4, "max_tokens": 8, "lr": 1e-3,
        "eval_problems": 12, "eval_every": 2, "checkpoint_every": 2, "keep": 0, "threads": 1, "quiet": True,
        "record_batches": True,
    }  # fmt: skip


@pytest.fixture
def file(tmp_path):
    rows = [{"prompt": f"{i}+1=", "chosen": f"#{i + 1}", "rejected": f"{i}#{i}"} for i in range(30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def figures(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def mean(line, name):
    return line[name]["sum"] / line[name]["count"]


@pytest.mark.parametrize("name", NAMES)
def test_every_pairwise_algorithm_learns_what_it_is_shown(name, paired, file, tmp_path):
    """Untrained weights, 30 rows of one kind: the margin on rows held out rises, and so does the accuracy."""
    run = tmp_path / "run"
    rate, steps = (3e-3, 40) if name == "reward_model" else (3e-3, 12)
    summary = train(
        TrainConfig(**(paired | {"algorithm": name, "task": file, "out": str(run), "steps": steps, "lr": rate}))
    )
    assert summary["eval_figure"] == "eval/pair_accuracy"
    lines = [line for line in figures(run) if "eval/pair_margin" in line]
    first, last = lines[0], lines[-1]
    assert mean(last, "eval/loss") < mean(first, "eval/loss")
    assert mean(last, "eval/pair_margin") > mean(first, "eval/pair_margin")
    assert mean(last, "eval/pair_accuracy") >= max(0.9, mean(first, "eval/pair_accuracy"))
    gap = mean(last, "eval/chosen_reward") - mean(last, "eval/rejected_reward")
    assert gap == pytest.approx(mean(last, "eval/pair_margin"), rel=1e-4)
    assert ("eval/kl" in last) == (name != "reward_model")
    assert (run / "reference.safetensors").is_file() == (name != "reward_model")
    if name != "reward_model":
        assert mean(first, "eval/kl") < 1e-9 < mean(last, "eval/kl")
    assert (sorted((run / "checkpoints").glob("*"))[-1] / "scalar_heads.safetensors").is_file() == (
        name == "reward_model"
    )


def test_a_batch_holds_both_responses_of_each_pair_and_the_start_says_their_log_probs(paired, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(paired | {"out": str(run), "eval_problems": 0, "flipped_pairs": 0.0})))
    batch = load_rollouts(run / "batches/000003.safetensors")
    assert batch.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.rewards.tolist() == [1.0, 0.0] * 4
    told = bundled_pairs(0, 0.0, 0)
    model, tokenizer = load_model(paired["model"])
    for row in range(8):
        pair = told.rows[told.place(8 + row // 2)]
        text = tokenizer.decode(batch.tokens[row][batch.mask[row]])
        assert text == (pair.rejected if row % 2 else pair.chosen) + "<eos>"
        before = batch.tokens[row][(batch.tokens[row] >= 0) & ~batch.mask[row]]
        assert tokenizer.decode(before) == pair.prompt
    start = Scorer(model).terms(batch).logp
    assert torch.allclose(batch.logp_ref[batch.mask], start[batch.mask], atol=1e-5)
    assert not bool(batch.logp_ref[~batch.mask].any())


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_a_run_on_pairs_goes_on_bit_for_bit(name, paired, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(paired | {"algorithm": name, "out": str(run)})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    for file in ("model.safetensors", "trainer/optimizer.safetensors", "scalar_heads.safetensors"):
        one, two = (run / "checkpoints/step_000004" / file for run in (whole, cut))
        assert one.is_file() == two.is_file()
        assert not one.is_file() or one.read_bytes() == two.read_bytes()
    untimed = [[{k: v for k, v in line.items() if k != "time"} for line in figures(run)] for run in (whole, cut)]
    assert untimed[0] == untimed[1]


def unfinished(paired, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(paired | {"out": str(run), "eval_problems": 0})))
    shutil.rmtree(run / "checkpoints/step_000004")
    (run / "summary.json").unlink()
    return run


@pytest.mark.parametrize("what", ["rows", "model", "chat template", "numbers"])
def test_log_probs_of_another_reference_are_refused(what, paired, tmp_path):
    run = unfinished(paired, tmp_path)
    path = run / "reference.safetensors"
    with safe_open(str(path), framework="pt") as f:
        key = json.loads(f.metadata()["key"])
    assert set(key) == {"rows", "model", "chat template", "numbers"}
    save_file(load_file(str(path)), str(path), metadata={"key": json.dumps(key | {what: "another"})})
    with pytest.raises(InputError, match=f"for other {what} than the run has now"):
        train(recorded_config(run).but(out=str(run), resume=True, quiet=True))


def test_log_probs_that_are_gone_are_not_made_of_weights_that_moved(paired, tmp_path):
    run = unfinished(paired, tmp_path)
    (run / "reference.safetensors").unlink()
    with pytest.raises(InputError, match="after step 2 the weights are no longer those of the start"):
        train(recorded_config(run).but(out=str(run), resume=True, quiet=True))


@pytest.mark.parametrize(("name", "port"), [("dpo", "29661"), ("reward_model", "29662")])
def test_two_processes_give_the_run_of_one(name, port, paired, tmp_path, spawn):
    options = {**paired, "algorithm": name, "steps": 2, "out": str(tmp_path / "one"), "dtype": "float64"}
    train(TrainConfig(**options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port)
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    name = "checkpoints/step_000002/model.safetensors"
    one, two = (load_file(str(tmp_path / run / name)) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)
    for a, b in zip(figures(tmp_path / "one"), figures(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        for figure in ("eval/pair_margin", "pair_margin", "loss"):
            if figure in a:
                assert a[figure]["sum"] == pytest.approx(b[figure]["sum"], rel=1e-9, abs=1e-12)


def source(model, tokenizer, name, pairs=6):
    a = kenpo.get(name)
    told = bundled_pairs(0, 0.0, 0)
    return Pairs(
        PairStream(told.rows[:40], [], 0), tokenizer, 64, PairOptions(batch=pairs, dtype=torch.float64), pair_figures(a)
    )


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_the_gradient_does_not_depend_on_the_budget_and_a_pair_above_it_takes_two_phases(name, models):
    """Whole pairs in one phase, however they are cut; a budget below a pair's tokens: two phases, the same gradient."""
    model, tokenizer = load_model(str(models / "qwen3"), dtype="float64")
    batch = source(model, tokenizer, name).next(1, None).rollouts
    a, found = kenpo.get(name), []
    heads = new_heads(model, ["score"], seed=1) if name == "reward_model" else None
    for budget in (10_000, 90, 20):
        learner = Learner(Scorer(model, heads=heads, scalars_only=heads is not None), LearnerOptions(budget))
        rollouts = (
            batch.replace(logp_ref=learner.terms(batch).logp - 0.1 * batch.rewards[:, None]) if not heads else batch
        )
        prepared = kenpo.prepare(a, rollouts)
        two = learner._in_two_phases(prepared, a, list(range(len(batch))))
        assert two == (budget == 20)
        sums, _ = learner.gradient(prepared, a).read(learner.ranks)
        grads = [p.grad.clone() for _, p in learner.scorer.named_parameters() if p.grad is not None]
        found.append((sums["loss"][0], torch.cat([g.flatten() for g in grads])))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12)
        assert float((gradient - found[0][1]).norm()) <= 1e-10 * float(found[0][1].norm())


def test_held_out_figures_are_those_of_the_formula(models):
    """Loss, accuracy, margin, rewards and distance against plain Python on the model's own log-probs."""
    model, tokenizer = load_model(str(models / "qwen3"), dtype="float64")
    s = source(model, tokenizer, "dpo")
    batch = s.next(1, None).rollouts
    scorer = Scorer(model)
    policy = scorer.terms(batch)
    noise = torch.linspace(-2, 2, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)
    batch = batch.replace(logp_ref=policy.logp + noise)
    found = pair_figures(kenpo.get("dpo"))(batch, policy)
    sums = [-0.1 * sum(x for x, m in zip(row, mask, strict=True) if m)
            for row, mask in zip(noise.tolist(), batch.mask.tolist(), strict=True)]  # fmt: skip
    h = [sums[i] - sums[i + 1] for i in range(0, len(sums), 2)]
    want = {
        "loss": sum(math.log1p(math.exp(-x)) for x in h), "pair_margin": sum(h),
        "pair_accuracy": sum(x > 0 for x in h),
        "chosen_reward": sum(sums[0::2]), "rejected_reward": sum(sums[1::2]),
    }  # fmt: skip
    for name, value in want.items():
        assert found[name] == (pytest.approx(value, rel=1e-9), len(h)), name
    kept = [x for row, mask in zip(noise.tolist(), batch.mask.tolist(), strict=True)
            for x, m in zip(row, mask, strict=True) if m]  # fmt: skip
    assert found["kl"] == (pytest.approx(sum(x * x / 2 for x in kept), rel=1e-9), len(kept))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"group_size": 4}, "--prompts counts pairs"),
        ({"algorithm": "grpo", "flipped_pairs": 0.1}, "belongs to pairs"),
        ({"algorithm": "sft", "chosen_column": "x"}, "belongs to pairs"),
        ({"dropped_carry": 0.1}, "belongs to demonstrations"),
        ({"chosen_column": "x"}, "name a file's parts"),
        ({"flipped_pairs": 1.5}, "not a share"),
        ({"unusable_pairs": "keep"}, "unusable_pairs"),
        ({"algorithm": "reward_model", "eval_task": "addition"}, "it answers nothing"),
        ({"algorithm": "reward_model", "critic": "trunk"}, "reads values"),
        ({"settings": {"surrogate.margin": True}}, "no margin"),
        ({"stages": ["drop_uniform_groups"]}, "read in order"),
    ],
)
def test_what_has_no_effect_on_pairs_is_refused(change, what, paired, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(paired | {"out": str(tmp_path / "x")} | change)))


def test_flipped_pairs_on_a_file_are_refused(paired, file):
    with pytest.raises(InputError, match="belongs to the addition pairs"):
        resolve(TrainConfig(**(paired | {"task": file, "flipped_pairs": 0.2})))


def test_the_plan_says_what_becomes_of_the_reference(paired):
    plan = train(TrainConfig(**(paired | {"dry_run": True})))["plan"]
    assert "scored once before step 1 and kept in the run's folder" in plan
    assert "4 rows a step of addition, as pairs" in plan
