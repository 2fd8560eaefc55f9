"""--sampling-tokens: resolved once, recorded, kept on resume, the same samples whatever it is."""

import json
import os
import signal

import pytest

from kenpo.cli import main
from kenpo.engines import room
from kenpo.errors import InputError
from kenpo.trainer import setup
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.loop import Interrupted, train
from tests.trainer.test_resume import metrics, stop_after


def recorded(run):
    return json.loads((run / "config.json").read_text())["sampling_tokens"]


@pytest.fixture
def free(monkeypatch):
    """Set what the engine believes it may hold."""
    return lambda tokens: monkeypatch.setattr(room, "free_memory", lambda device: 2 * tokens * ROOM_BYTES)


ROOM_BYTES = 100_000_000


@pytest.fixture(autouse=True)
def big_tokens(monkeypatch):
    monkeypatch.setattr(room, "token_bytes", lambda model, max_tokens: ROOM_BYTES)


@pytest.fixture
def given(monkeypatch):
    """What each run's engine was bounded by."""
    found, opened = [], setup.open_engine
    monkeypatch.setattr(setup, "open_engine", lambda *args: found.append(args[3]) or opened(*args))
    return found


def test_it_is_resolved_once_recorded_and_kept(options, free, given, tmp_path):
    free(5000)
    with pytest.raises(Interrupted):
        train(TrainConfig(**options, out=str(tmp_path / "run")), stop_after(2, interrupt))
    assert recorded(tmp_path / "run") == 4096
    free(40_000)
    train(TrainConfig(**options, out=str(tmp_path / "run"), resume=True))
    assert recorded(tmp_path / "run") == 4096
    train(TrainConfig(**options, out=str(tmp_path / "other")))
    assert recorded(tmp_path / "other") == 32768
    train(TrainConfig(**options, sampling_tokens=40, out=str(tmp_path / "given")))
    assert recorded(tmp_path / "given") == 40
    assert given == [4096, 4096, 32768, 40]
    assert samples(tmp_path / "given") == samples(tmp_path / "other") == samples(tmp_path / "run")


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def samples(run):
    """What was sampled, step by step."""
    return [json.loads(line)["completion"] for line in (run / "samples.jsonl").read_text().splitlines()]


def test_another_number_may_be_given_when_a_run_goes_on(options, free, given, tmp_path):
    free(5000)
    with pytest.raises(Interrupted):
        train(TrainConfig(**options, out=str(tmp_path / "run")), stop_after(2, interrupt))
    train(TrainConfig(**options, out=str(tmp_path / "run"), resume=True, sampling_tokens=64))
    assert given == [4096, 64]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(7))


def test_the_plan_shows_it(options, free, capsys):
    free(4096)  # less what training takes later
    args = ["train", "--model", options["model"], "--dry-run", "--eval-problems", "0", "--threads", "1"]
    assert main(args) == 0
    assert "2,048 tokens at once" in capsys.readouterr().out
    assert main([*args, "--sampling-tokens", "77"]) == 0
    out = capsys.readouterr().out
    assert "77 tokens at once" in out
    assert "sampling_tokens = 77" in out


def test_where_it_has_no_effect_it_is_refused():
    with pytest.raises(InputError, match=r"bounds the embedded engine, not own\.py:E"):
        TrainConfig(engine="own.py:E", sampling_tokens=8)
    with pytest.raises(InputError, match="nothing is sampled"):
        resolve(TrainConfig(algorithm="sft", task="pairs.jsonl", sampling_tokens=8))
    assert resolve(TrainConfig(algorithm="sft", sampling_tokens=8)).sampling_tokens == 8
    with pytest.raises(InputError, match="least allowed"):
        TrainConfig(sampling_tokens=0)
