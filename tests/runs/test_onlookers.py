"""Loggers that fail, processes by the environment, paths, and the clock of chat templates."""

import json
import types
from pathlib import Path

import pytest

from kenpo.errors import InputError
from kenpo.models import clock
from kenpo.ranks import Ranks, among
from kenpo.runs import callbacks
from kenpo.runs.callbacks import Dispensable, Tracker
from kenpo.trainer.config import TrainConfig

FAILS = ["init", "log", "finish"]


def service(fails):
    """A tracking service, one of whose functions raises."""
    seen = []

    def function(name):
        def call(*a, **k):
            seen.append(name)
            if name == fails:
                raise ConnectionError("the service went away")

        return call

    return types.SimpleNamespace(seen=seen, **{n: function(n) for n in FAILS})


@pytest.mark.parametrize("fails", FAILS)
def test_a_logger_that_fails_is_left_out_with_one_note(fails, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    notes, module = [], service(fails)
    logger = Dispensable("trackio", Tracker(module), notes.append)
    logger.on_start(None, tmp_path, 0)
    for step in (1, 2, 3):
        logger.on_step(step, {"reward": {"sum": 1.0, "count": 2}})
    logger.on_end({})
    assert len(notes) == 1
    assert "trackio failed (ConnectionError: the service went away)" in notes[0]
    assert module.seen.count(fails) == 1


def test_an_interrupt_passes_through_a_logger(tmp_path):
    class Stopping(callbacks.Callback):
        def on_step(self, step, figures):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dispensable("x", Stopping(), print).on_step(1, {})


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    "given", [{}, {"RANK": "1"}, {"RANK": ""}, {"WORLD_SIZE": ""}, {"RANK": "3", "WORLD_SIZE": "1"}, {"RANK": "0"}]
)
def test_a_rank_alone_makes_no_group(given, environment):
    for name, value in given.items():
        environment(name, value)
    assert among() == (0, 1)
    assert Ranks.start().first


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "no place among"),
    ],
)
def test_half_a_group_is_one_clear_line(given, what, environment):
    for name, value in given.items():
        environment(name, value)
    with pytest.raises(InputError, match=what) as error:
        Ranks.start()
    assert "\n" not in str(error.value)


def test_paths_are_whole_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "m").mkdir()
    config = TrainConfig(
        task="d/data.jsonl", eval_file="~/held.jsonl", model="m", algorithm="my.py:MINE", out="~/runs/x",
        verifier=("a.py:f=1", "numeric=0.2"),
    )  # fmt: skip
    whole = config.whole()
    assert whole.task == str(tmp_path / "d/data.jsonl")
    assert whole.eval_file == str(tmp_path / "home/held.jsonl")
    assert whole.model == str(tmp_path / "m")
    assert whole.algorithm == f"{tmp_path}/my.py:MINE"
    assert whole.out == str(tmp_path / "home/runs/x")
    assert whole.verifier == (f"{tmp_path}/a.py:f=1", "numeric=0.2")
    named = TrainConfig(task="reasoning_gym:chain_sum", model="org/name", algorithm="grpo", verifier="numeric")
    assert named.whole() == named
    assert whole.whole() == whole


def test_a_template_reads_one_moment(monkeypatch):
    from tiny import byte_tokenizer

    from kenpo.models.loading import encode_prompt

    tok = byte_tokenizer()
    tok.chat_template = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}{{ messages[0]['content'] }}"
    monkeypatch.setattr(clock, "_moment", None)
    clock.set_clock(1e9)
    first = encode_prompt(tok, "hi")
    clock.set_clock(1e9 + 90000)
    assert encode_prompt(tok, "hi") != first
    clock.set_clock(1e9)
    assert encode_prompt(tok, "hi") == first


def test_a_checkpoint_is_not_the_run(tmp_path):
    from kenpo.trainer.settle import recorded_config

    step = tmp_path / "run/checkpoints/step_000002"
    step.mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"algorithm": "grpo"}))
    with pytest.raises(InputError, match=f"go on with the run: --resume {Path(tmp_path / 'run')}"):
        recorded_config(step)
