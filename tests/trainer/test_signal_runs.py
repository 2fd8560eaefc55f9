"""Trackers and quantiles in runs, saved and resumed on one process and two; figures of prompts with several answers."""

import json
import math
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from kenpo.cli import main
from kenpo.experience.episode import answer_id
from kenpo.experience.hints import most_frequent
from kenpo.experience.variety import from_uniform, self_bleu, variety
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.types import Rollouts

from .test_resume import metrics, same_end, stop_after

# -- runs --


def pool(tmp_path, number=6):
    rows = [{"prompt": f"{100 + i}+{200 + i}=", "answer": str(300 + 2 * i)} for i in range(number)]
    path = tmp_path / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tracked(options, tmp_path):
    return options | {
        "task": pool(tmp_path), "algorithm": "spo", "settings": {}, "prompts": 4, "group_size": 1, "eval_problems": 0,
        "lr": 1e-2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["spo", "riskpo", "riskpo-masses"])
def test_a_run_that_remembers_goes_on_bit_for_bit(name, tracked, tmp_path):
    given = tracked | {"algorithm": name} | ({} if name == "spo" else {"group_size": 3, "prompts": 5})
    train(TrainConfig(**given, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**given, out=str(tmp_path / "b")), stop_after(3, fall))
    train(TrainConfig(**given, out=str(tmp_path / "b"), resume=True))
    same_end(tmp_path / "b", tmp_path / "a")
    if name == "spo":
        assert metrics(tmp_path / "a")[-1]["drift"]["count"] > 0


def command(given):
    return ["train", "--model", given["model"], "--verifier", given["verifier"], "--task", given["task"], "--algorithm",
            "spo", "--steps", "6", "--prompts", "4", "--group-size", "1", "--max-tokens", "8", "--lr", "1e-2",
            "--eval-problems", "0", "--checkpoint-every", "2", "--threads", "1", "--quiet"]  # fmt: skip


def test_a_killed_run_that_remembers_ends_as_one_left_alone(tracked, tmp_path, spawn):
    args = command(tracked)
    assert main([*args, "--out", str(tmp_path / "a")]) == 0
    process = spawn(*args, "--out", tmp_path / "b")
    for _ in range(1200):
        if found(tmp_path / "b" / "checkpoints"):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(["train", "--resume", str(tmp_path / "b"), "--quiet"]) == 0
    same_end(tmp_path / "b", tmp_path / "a")


@pytest.mark.slow
def test_two_processes_remember_what_one_does(tracked, tmp_path, spawn):
    args = [*command(tracked | {"model": tracked["model"].replace("qwen3", "gpt2")}), "--dtype", "float64"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    one, two = spawn(*args, "--out", tmp_path / "a"), spawn(*args, "--out", tmp_path / "b", launcher=launcher)
    assert one.wait(300) == 0
    assert two.wait(300) == 0
    for a, b in zip(*([load_file(f) for f in sorted((tmp_path / n / "batches").iterdir())] for n in "ab"), strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.allclose(a["drift"], b["drift"], rtol=0, atol=1e-12, equal_nan=True)
    ends = [load_file(found(tmp_path / n / "checkpoints")[-1] / "model.safetensors") for n in "ab"]
    for name, value in ends[0].items():
        assert (value - ends[1][name]).norm() <= 1e-9 * value.norm() + 1e-15, name


# -- several valid answers --


def group_of(answers, tokens=None):
    rows = len(answers)
    return Rollouts(
        mask=torch.tensor([[False, True, True]] * rows), group=torch.zeros(rows, dtype=torch.int64),
        rewards=torch.zeros(rows), answer=torch.tensor([answer_id(a) for a in answers]),
        prompt_id=torch.full((rows,), 4), tokens=torch.tensor([[9, *t] for t in tokens or [[1, 2]] * rows]),
    )  # fmt: skip


def figures_of(answers, valid, tokens=None):
    return variety(group_of(answers, tokens), {4: [answer_id(v) for v in valid]})


def test_figures_of_varied_answers():
    even = figures_of(["a", "b", "a", "b", "x"], ["a", "b"])
    assert even["answers/distinct"] == {"sum": 2.0, "count": 1}
    assert even["answers/divergence"]["sum"] == pytest.approx(0.0, abs=1e-12)
    assert even["answers/valid"] == {"sum": 4.0, "count": 5}
    one = figures_of(["a", "a"], ["a", "b", "c"], [[1, 2], [3, 4]])
    m = (1 + 1 / 3) / 2
    want = 0.5 * math.log(1 / m) + 0.5 * (math.log(1 / 3 / m) + 2 * math.log(2)) / 3
    assert one["answers/divergence"]["sum"] == pytest.approx(want)
    assert one["answers/variety"] == {"sum": 1.0, "count": 1}
    none = figures_of(["x", "y"], ["a"])
    assert none["answers/distinct"] == {"sum": 0.0, "count": 0}
    assert from_uniform([3, 3, 3]) == pytest.approx(0.0, abs=1e-12)


def test_self_bleu():
    # 1-grams 2/3, 2-grams 1/2, 3-grams 0 shared of 3 tokens: no 3-gram in common, so 0
    assert self_bleu([[1, 2, 3], [1, 2, 4]]) == 0.0
    # orders 1 and 2 of the text of two tokens: both shared; the closest other is longer by one: e^(1 − 3/2)
    # the text of three tokens shares 2 of 3 and 1 of 2, no trigram: 0
    assert self_bleu([[1, 2], [1, 2, 4]]) == pytest.approx(math.exp(1 - 3 / 2) / 2)
    assert self_bleu([[1, 1], [1, 2]], order=1) == pytest.approx(0.5)  # a repeated gram counts once
    assert self_bleu([[], []]) == 1.0


def test_the_figures_come_with_any_algorithm_where_answers_are_many(options, tmp_path):
    rows = [{"prompt": f"{n}=", "answer": ["1", "2"], "valid": ["1", n], "target": [0.25, 0.75]} for n in range(5, 9)]
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = options | {"task": str(path), "verifier": "exact", "eval_problems": 0, "steps": 1}
    for name in ("grpo", "mad_rl"):
        train(TrainConfig(**given | {"algorithm": name}, out=str(tmp_path / name)))
        assert metrics(tmp_path / name)[-1]["answers/valid"]["count"] == 12
    train(TrainConfig(**given | {"task": pool(tmp_path)}, out=str(tmp_path / "one")))
    assert not any(n.startswith("answers/") for n in metrics(tmp_path / "one")[-1])


@pytest.mark.parametrize("name", ["spo", "gapo", "mad_rl", "ttrl", "riskpo", "riskpo-masses", "cispo-dynamic", "ttpo"])
def test_trains_on_the_bundled_task(name, options, tmp_path):
    given = options | {"algorithm": name, "settings": {}, "steps": 2, "prompts": 3, "eval_problems": 0}
    given |= {"checkpoint_every": 0}
    given |= {"group_size": 1, "prompts": 8} if name == "spo" else {}
    given |= {"teacher": "hint"} if name == "ttpo" else {}
    train(TrainConfig(**given, out=str(tmp_path / "a")))
    line = metrics(tmp_path / "a")[-1]
    assert line["updates"] == 1
    assert line["grad_norm"]["sum"] > 0 or name in (
        "gapo",
        "mad_rl",
        "ttrl",
        "ttpo",
    )  # random models: no valid answer at all


def test_the_majority_is_the_hint():
    assert most_frequent(["a", "b", None, "b"]) == "b"
    assert most_frequent([None, None]) is None
    tied = ["x", "y", "x", "y"]
    assert most_frequent(tied) == most_frequent(tied[::-1]) == min(("x", "y"), key=answer_id)
