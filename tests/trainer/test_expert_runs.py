"""Runs in whose groups an expert's traces stand beside the policy's samples."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

import kenpo
from kenpo.batches import load_rollouts
from kenpo.errors import InputError
from kenpo.experience.addition import AdditionTask, trace
from kenpo.trainer.config import TrainConfig, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config

TASK = AdditionTask(0)


@pytest.fixture
def mixed(options):
    return options | {"algorithm": "luffy", "settings": {}, "eval_problems": 0, "record_batches": True, "steps": 3}


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def batch(run, step=1):
    return load_rollouts(run / f"batches/{step:06d}.safetensors")


def weights(run, step):
    return load_file(str(run / f"checkpoints/step_{step:06d}/model.safetensors"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def traces(path, per_prompt=1, **columns):
    """A file with traces for every problem that these runs meet, each marked by its place."""
    rows = []
    for i in range(9):
        p = TASK.train(i)
        a, b = divmod(p.id, 1000)
        rows += [{"prompt": p.prompt, "trace": ";" * k + trace(a, b)} | columns for k in range(per_prompt)]
    return write(path, rows)


def text(model, row):
    from transformers import AutoTokenizer

    tokens = row.tokens[0]
    return AutoTokenizer.from_pretrained(model).decode(tokens[tokens >= 0].tolist())


@pytest.mark.parametrize("name", ["luffy", "luffy-known", "grin", "sft_mixture"])
def test_a_trace_joins_each_group(name, mixed, tmp_path):
    run = tmp_path / name
    train(TrainConfig(**(mixed | {"algorithm": name, "out": str(run), "steps": 2})))
    got = batch(run)
    expert = got.origin == 2
    assert got.group.tolist() == [g for g in range(3) for _ in range(5)]
    assert expert.tolist() == [False, False, False, False, True] * 3
    for g in range(3):
        a, b = divmod(TASK.train(g).id, 1000)
        assert text(mixed["model"], got[got.group == g][expert[got.group == g]]) == f"{a}+{b}={trace(a, b)}<eos>"
    assert not bool(got.truncated[expert].any())
    digits = [r["reward"] for r in lines(run, "samples.jsonl") if r["step"] == 1 and r.get("origin") == "expert"]
    assert got.rewards[expert].tolist() == pytest.approx(digits)
    before, after = load_file(f"{mixed['model']}/model.safetensors"), weights(run, 2)
    assert any(not torch.equal(before[n], after[n]) for n in before)


def test_what_an_expert_wrote_is_no_sample_of_the_policy(mixed, tmp_path):
    """Without log-probs of the expert they are unknown, and the figures of sampler, rewards and tokens leave it out."""
    run, file = tmp_path / "run", traces(tmp_path / "t.jsonl")
    train(TrainConfig(**(mixed | {"out": str(run), "expert": file})))
    got = batch(run)
    own = got.origin == 0
    assert bool(got.logp_sampler[~own][got.mask[~own]].isnan().all())
    assert bool(got.logp_sampler[own].isfinite().all())
    assert bool((got.policy_version[~own] == -1).all())
    line = lines(run)[0]
    assert line["reward"]["count"] == 12
    assert line["expert/rows"] == {"sum": 3, "count": 3}
    assert line["tokens"]["generated"] == int(got.mask[own].sum())
    assert line["tokens"]["filtered"] == 0
    assert line["tokens"]["trained"] == int(got.mask.sum())
    assert line["kl_sampler"]["count"] == int(got.mask[own].sum())
    assert line["sampler_gap"] < 1e-4
    numbers = [x["sum"] for figures in lines(run) for x in figures.values() if isinstance(x, dict) and "sum" in x]
    assert all(math.isfinite(x) for x in numbers)


def test_the_experts_own_log_probs_are_taken_as_they_are(mixed, tmp_path):
    ids = {i: [3 + i, 4, 5, 1] for i in range(3)}
    rows = [
        {"prompt": TASK.train(i).prompt, "trace": ids[i], "trace_logp": [-0.1 * (i + 1), -0.2, -0.3, 0.0]}
        for i in range(3)
    ]
    run = tmp_path / "run"
    fields = {"algorithm": "luffy-known", "out": str(run), "steps": 1, "expert": write(tmp_path / "t.jsonl", rows)}
    train(TrainConfig(**(mixed | fields)))
    got = batch(run)
    expert = got[got.origin == 2]
    assert expert.tokens[expert.mask].tolist() == [i for g in range(3) for i in ids[g]]
    wanted = [x for i in range(3) for x in (-0.1 * (i + 1), -0.2, -0.3, 0.0)]
    assert expert.logp_sampler[expert.mask].tolist() == pytest.approx(wanted)


def test_rows_and_traces_in_turn(mixed, tmp_path):
    """Two of three traces join each group, not always the same two; a problem without trace has none."""
    run, file = tmp_path / "run", tmp_path / "t.jsonl"
    traces(file, per_prompt=3)
    kept = [line for line in file.read_text().splitlines() if TASK.train(0).prompt not in line]
    file.write_text("\n".join(kept))
    train(TrainConfig(**(mixed | {"out": str(run), "expert": str(file), "expert_rows": 2, "steps": 3})))
    assert torch.bincount(batch(run).group[batch(run).origin == 2]).tolist() == [0, 2, 2]
    chosen = [r["completion"].count(";") for r in lines(run, "samples.jsonl") if r.get("origin") == "expert"]
    pairs = list(zip(chosen[::2], chosen[1::2], strict=True))
    assert len(set(pairs)) > 1
    assert all(a != b for a, b in pairs)


def test_an_uncut_gradient_follows_the_declaration(mixed, tmp_path):
    """What the run recorded, evaluated whole, has coefficients on the expert's tokens: the shaped probability acts."""
    run = tmp_path / "run"
    train(TrainConfig(**(mixed | {"out": str(run), "steps": 1})))
    got = batch(run)
    policy = kenpo.Policy(torch.full(got.mask.shape, math.log(0.1)))
    a = kenpo.get("luffy").with_settings({"aggregate.length": 8})
    result = kenpo.evaluate(a, got.replace(logp_old=policy.logp), policy)
    expert, one = (got.origin == 2).nonzero()[0], result.advantages.sum(1)
    at = got.mask[expert[0]].nonzero()[0, 0]
    assert float(result.coefficients[expert[0], at]) == pytest.approx(
        -0.25 * float(result.advantages[expert[0], at]) / 8
    )
    assert float(one[expert[0]]) != 0


def test_a_mixed_run_goes_on_bit_for_bit(mixed, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    file = traces(tmp_path / "t.jsonl", per_prompt=3)
    for run in (whole, cut):
        train(TrainConfig(**(mixed | {"out": str(run), "steps": 4, "keep": 0, "prompts": 2, "expert": file})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = weights(whole, 4), weights(cut, 4)
    assert all(torch.equal(one[n], two[n]) for n in one)
    with open(file, "a") as more:
        more.write(json.dumps({"prompt": "1+1=", "trace": "2"}) + "\n")
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    with pytest.raises(InputError, match="expert traces"):
        train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))


@pytest.mark.parametrize("name", ["luffy", "sft_mixture"])
def test_two_processes_give_the_run_of_one(name, mixed, tmp_path, spawn):
    options = {**mixed, "algorithm": name, "steps": 2, "out": str(tmp_path / "one"), "dtype": "float64"}
    train(TrainConfig(**options))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29671")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (weights(tmp_path / run, 2) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)
    assert batch(tmp_path / "two").origin.tolist() == batch(tmp_path / "one").origin.tolist()


NEEDED = {"prompt": TASK.train(0).prompt, "trace": "12"}


@pytest.mark.parametrize(
    ("rows", "change", "what"),
    [
        ([NEEDED], {"algorithm": "grpo"}, "--expert: no stage of 'grpo' reads who wrote a response"),
        ([NEEDED], {"algorithm": "luffy-known"}, "line 1: no log-probs of the expert"),
        ([{"prompt": "1+1=", "trace": "2"}], {}, "no trace belongs to a problem of the task"),
        ([{"prompt": "1+1="}], {}, "line 1: no trace"),
        ([{**NEEDED, "trace": [5, "x"]}], {}, "no.*list|list that is not one of token ids"),
        ([{**NEEDED, "trace": 5.5}], {}, "holds a float"),
        ([{**NEEDED, "trace_logp": [-0.1, 0.2, 0.0]}], {}, "which is no log-prob"),
        ([{**NEEDED, "trace_logp": [-0.1, -0.2]}], {}, "2 numbers in column 'trace_logp', but the trace has 3 tokens"),
        ([{**NEEDED, "trace": "twelve"}], {}, "characters that the tokenizer does not know"),
        ([{**NEEDED, "trace": [99]}], {}, "outside the model's vocabulary"),
        ([{**NEEDED, "trace": "1" * 60}], {}, "do not fit the model's context of 64"),
    ],
)
def test_traces_that_can_not_be_used_are_refused_before_a_folder_is_made(rows, change, what, mixed, tmp_path):
    fields = mixed | {"out": str(tmp_path / "run"), "expert": write(tmp_path / "t.jsonl", rows)} | change
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**fields))
    assert not (tmp_path / "run").exists()


def test_a_task_without_traces_asks_for_a_file(mixed, tmp_path):
    task = write(tmp_path / "task.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)])
    with pytest.raises(InputError, match="no column 'trace'; name a file"):
        train(TrainConfig(**(mixed | {"out": str(tmp_path / "run"), "task": task})))


@pytest.mark.parametrize("option", ["expert", "corpus"])
def test_a_file_that_is_not_there_is_one_line(option, mixed, tmp_path):
    more = {"algorithm": "luffy"} if option == "expert" else {"algorithm": "grpo", "stages": ("supervised_nll",)}
    fields = {**mixed, "expert": None, **more, option: str(tmp_path / "none.jsonl"), "out": str(tmp_path / "x")}
    with pytest.raises(InputError, match="no such file"):
        train(TrainConfig(**fields))
    assert not (tmp_path / "x").exists()
