"""A corpus beside the samples: ppo-ptx and any algorithm with the likelihood of supervised rows."""

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
from kenpo.types import SUPERVISED

TEXTS = [("12+34=", "46"), ("20+5=", "25;25"), ("7+8=", "15"), ("1+1=", "2"), ("99+9=", "108")]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in TEXTS))
    return str(path)


@pytest.fixture
def mixed(options, corpus):
    return options | {"algorithm": "ppo-ptx", "settings": {}, "eval_problems": 0, "corpus": corpus, "steps": 4}


def batch(run, step):
    return load_file(str(run / f"batches/{step:06d}.safetensors"))


def figures(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_the_corpus_stand_beside_the_samples(mixed, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(mixed | {"out": str(run), "steps": 2, "corpus_rows": 4})))
    one, two = batch(run, 1), batch(run, 2)
    given = one["origin"] == SUPERVISED
    assert given.tolist() == [False] * 12 + [True] * 4
    assert bool(one["rewards"][given].isnan().all())
    assert not bool(one["rewards"][~given].isnan().any())
    assert len(set(one["group"].tolist())) == 3 + 4
    assert not bool(one["values_old"][one["mask"]].isnan().any())
    lengths = sorted(len(r) + 1 for _, r in TEXTS)  # characters, and the end
    seen = [int(n) for b in (one, two) for n in b["mask"][b["origin"] == SUPERVISED].sum(1)]
    assert sorted(seen[:5]) == lengths  # all five rows before the sixth place, which begins anew
    lines = [line for line in figures(run) if line["step"]]
    assert lines[0]["corpus/length"] == {"sum": sum(seen[:4]), "count": 4}
    assert lines[0]["tokens"]["filtered"] == 0  # what the policy did not sample does not count as sampled
    assert all(math.isfinite(line["supervised_nll"]["sum"]) for line in lines)


def test_the_corpus_is_learnt(mixed, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(mixed | {"out": str(run), "steps": 30, "corpus_rows": 5, "lr": 5e-3})))
    lines = [line for line in figures(run) if line["step"]]
    first, last = (line["supervised_nll"]["sum"] / line["supervised_nll"]["count"] for line in (lines[0], lines[-1]))
    assert last < 0.5 * first


def test_a_corpus_changes_neither_samples_nor_advantages_of_the_first_batch(mixed, tmp_path):
    for name, algorithm in (("with", "ppo-ptx"), ("without", "ppo")):
        more = {"algorithm": algorithm, "out": str(tmp_path / name), "steps": 1}
        train(TrainConfig(**(mixed | more | ({} if name == "with" else {"corpus": None}))))
    one, two = batch(tmp_path / "with", 1), batch(tmp_path / "without", 1)
    width = two["tokens"].shape[1]
    assert torch.equal(one["tokens"][:12, :width], two["tokens"])
    assert torch.equal(one["rewards"][:12], two["rewards"])
    lines = [next(x for x in figures(tmp_path / n) if x["step"]) for n in ("with", "without")]
    for name in ("advantage_abs", "value_loss", "explained_variance", "returns/1of4"):
        assert lines[0][name]["sum"] == pytest.approx(lines[1][name]["sum"], rel=1e-5, abs=1e-7)
        assert lines[0][name]["count"] == pytest.approx(lines[1][name]["count"], rel=1e-6)


@pytest.mark.parametrize("algorithm", ["ppo-ptx", "dapo", "remax"])
def test_a_run_with_a_corpus_goes_on_bit_for_bit(algorithm, mixed, tmp_path):
    more = {"algorithm": algorithm, "keep": 0, "minibatches": 2}
    more |= {} if algorithm == "ppo-ptx" else {"stages": ("supervised_nll",)}
    more |= {"minibatches": 1} if algorithm == "remax" else {}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(mixed | more | {"out": str(run)})))
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = (load_file(str(run / "checkpoints/step_000004/model.safetensors")) for run in (whole, cut))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_row_that_does_not_fit_stops_the_run_before_it_begins(mixed, corpus, tmp_path):
    with open(corpus, "a") as f:
        f.write(json.dumps({"prompt": "1+1=", "response": "2" * 100}) + "\n")
    with pytest.raises(InputError, match="tokens do not fit"):
        train(TrainConfig(**(mixed | {"out": str(tmp_path / "x")})))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"corpus": None}, "name a file of prompts and responses: --corpus FILE"),
        ({"corpus": None, "corpus_rows": 2}, "there is no corpus"),
        ({"algorithm": "ppo"}, "no stage of 'ppo' reads rows without a reward"),
        ({"algorithm": "luffy"}, "no stage of 'luffy' reads rows without a reward"),
        ({"corpus_rows": 0}, "below the least allowed"),
    ],
)
def test_a_corpus_that_can_not_be_read_is_refused(change, what, mixed, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(mixed | {"out": str(tmp_path / "x")} | change)))
