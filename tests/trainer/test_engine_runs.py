"""Runs that sample on vLLM's server, here a stub of it that samples with transformers: the embedded engine's run."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from vllm_stub import Stub

from kenpo.errors import InputError, RunError
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config


@pytest.fixture
def stub():
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def served(options, stub):
    more = {"engine": "vllm", "engine_url": stub.url, "dtype": "float64", "record_batches": True, "steps": 3}
    return options | more


def batches(run):
    return [load_file(str(f)) for f in sorted((run / "batches").iterdir())]


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_run_is_that_of_the_embedded_engine(rank, served, stub, tmp_path):
    train(TrainConfig(**(served | {"lora_rank": rank, "out": str(tmp_path / "served")})))
    plain = served | {"engine": "hf", "engine_url": None, "lora_rank": rank, "out": str(tmp_path / "plain")}
    train(TrainConfig(**plain))
    one, two = batches(tmp_path / "served"), batches(tmp_path / "plain")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["policy_version"], b["policy_version"])
        assert torch.allclose(a["logp_sampler"], b["logp_sampler"], rtol=0, atol=1e-9, equal_nan=True)
    assert [line["eval/accuracy"] for line in lines(tmp_path / "served") if "eval/accuracy" in line] == [
        line["eval/accuracy"] for line in lines(tmp_path / "plain") if "eval/accuracy" in line
    ]
    assert all(line["sampler_gap"] < 1e-9 for line in lines(tmp_path / "served") if line["step"])
    assert stub.loaded == 4  # at the start, and after each of three updates
    assert stub.mixed == 0


def test_weights_that_stay_behind_stop_the_run(served, stub, tmp_path):
    stub.stale = True
    with pytest.raises(RunError, match="step 2: the sampler's log-probs differ from the trainer's"):
        train(TrainConfig(**(served | {"out": str(tmp_path / "run"), "lr": 0.01})))
    gaps = [line["sampler_gap"] for line in lines(tmp_path / "run") if line["step"]]
    assert gaps == [pytest.approx(0, abs=1e-9)]


def test_a_server_that_dies_in_a_run_changes_nothing(served, stub, tmp_path):
    train(TrainConfig(**(served | {"out": str(tmp_path / "whole")})))
    stub.die = 4
    train(TrainConfig(**(served | {"out": str(tmp_path / "hurt")})))
    assert stub.die == 0
    for a, b in zip(batches(tmp_path / "whole"), batches(tmp_path / "hurt"), strict=True):
        assert all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)


def test_a_resumed_run_may_find_its_server_elsewhere(served, stub, tmp_path):
    import shutil

    for name in ("whole", "cut"):
        train(TrainConfig(**(served | {"out": str(tmp_path / name), "checkpoint_every": 1, "keep": 0})))
    for path in ("checkpoints/step_000003", "checkpoints/step_000002"):
        shutil.rmtree(tmp_path / "cut" / path)
    (tmp_path / "cut/summary.json").unlink()
    again = recorded_config(tmp_path / "cut").but(out=str(tmp_path / "cut"), resume=True, quiet=True)
    with pytest.raises(RunError, match="not up after"):
        train(again.but(engine_url="http://127.0.0.1:9", engine_limit=0.5))
    train(again.but(engine_url=stub.url.replace("127.0.0.1", "localhost")))
    for a, b in zip(batches(tmp_path / "whole"), batches(tmp_path / "cut"), strict=True):
        assert all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"engine_url": "http://example.org:8000"}, "expected http://127.0.0.1:PORT"),
        ({"engine_url": None, "engine_python": "no/such/python"}, "no such file"),
        ({"engine": "hf"}, "--engine-url is for --engine vllm"),
        ({"top_p": 0.9}, "which ids it kept"),
        ({"lag": 1}, "--lag 1"),
        ({"engine_limit": 0.0}, "--engine-limit"),
        ({"sampling_tokens": 10}, "--sampling-tokens"),
    ],
)
def test_what_has_no_effect_or_can_not_be_is_refused(change, what, served, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(served | {"out": str(tmp_path / "x")} | change)))
    assert not (tmp_path / "x").exists()


def test_a_plan_starts_no_server(served, stub, tmp_path):
    assert "engine" in train(TrainConfig(**(served | {"dry_run": True, "out": str(tmp_path / "x")})))["plan"]
    assert stub.calls == []
