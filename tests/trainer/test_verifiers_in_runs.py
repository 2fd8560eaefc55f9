"""Verifiers as `kenpo train` and `kenpo eval` use them: chosen, shown, recorded, weighted, and given up early."""

import json
import time

import pytest

from kenpo.cli import main
from kenpo.trainer.config import TrainConfig, load
from kenpo.trainer.loop import train

SOURCE = """
print("\\x1b[31mloaded")
def digits(completion): return sum(c.isdigit() for c in completion) / max(1, len(completion))
def short(completions, answers, level): return [{"reward": -len(c), "level": level[0]} for c in completions]
def broken(completion): return 1 / 0
def hangs(completion):
    import time
    time.sleep(60)
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "r.py").write_text(SOURCE)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(9) for b in range(9)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def run(models, files, capsys):
    """`kenpo train` on the rows of `files`; (status, what stood on standard output, on standard error)."""

    def start(*more, name="run"):
        argv = ["train", "--model", models / "qwen3", "--task", files / "d.jsonl", "--steps", "1", "--prompts", "2",
                "--group-size", "2", "--max-tokens", "6", "--threads", "1", "--out", files / name, *more]  # fmt: skip
        capsys.readouterr()
        status = main(list(map(str, argv)))
        return status, *capsys.readouterr()

    return start


def test_the_verifier_that_the_task_chose_is_recorded_and_shown(run, files, models, capsys):
    status, out, _ = run("--eval-problems", "2")
    assert status == 0
    assert "judged by numeric" in out.splitlines()[0]
    assert json.loads((files / "run/config.json").read_text())["verifier"] == "numeric"
    status, out, _ = run("--dry-run", name="dry")
    assert "judge            yes  numeric\n" in out
    assert "verifier = numeric\n" in out
    argv = ["eval", models / "qwen3", "--task", files / "d.jsonl", "--problems", "3", "--max-tokens", "6"]
    assert main([*map(str, argv), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["d"]["verifier"] == "numeric"
    assert main(list(map(str, argv))) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("numeric")


def test_what_a_function_prints_is_shown_on_standard_error(run, files):
    status, _, error = run("--verifier", f"{files}/r.py:digits", "--verifier-workers", "1", "--eval-problems", "0")
    assert status == 0
    printed = [line for line in error.splitlines() if not line.startswith("note: ")]  # what the run says of itself
    assert printed == [f"[{files}/r.py:digits] \\x1b[31mloaded"]
    status, _, error = run("--verifier", f"{files}/r.py:digits", "--quiet", "--eval-problems", "0", name="quiet")
    assert (status, error) == (0, "")


def test_several_with_weights_are_parts_of_one_reward(run, files, models, capsys):
    pair = [f"{files}/r.py:digits=2", f"{files}/r.py:short=0.5"]
    status, _, _ = run("--verifier", *pair, "numeric=0", "--eval-problems", "2")
    assert status == 0
    config = json.loads((files / "run/config.json").read_text())
    assert config["verifier"] == [*pair, "numeric=0"]
    assert load(files / "run/config.json").verifier == (*pair, "numeric=0")
    for line in (files / "run/samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        parts = record["parts"]
        assert parts.keys() == {"digits", "short", "short.level", "numeric"}
        assert record["reward"] == pytest.approx(2 * parts["digits"] + 0.5 * parts["short"])
        assert parts["short"] == -len(record["completion"])
    figures = json.loads((files / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert figures["part/digits"]["count"] == 4
    _, out, _ = run("--verifier", pair[0], "--verifier", pair[1], "--dry-run", name="dry")
    assert f"judge            yes  {pair[0]} + {pair[1]}: 2 process(es), 10 s a call, 8.0 GiB of address space" in out
    argv = ["eval", models / "qwen3", "--task", files / "d.jsonl", "--problems", "3", "--max-tokens", "6", "--json"]
    assert main([*map(str, argv), "--verifier", *pair]) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["d"]["verifier"] == " ".join(pair)


def test_a_resumed_run_keeps_its_verifiers(options, tmp_path, verifier):
    pair = (verifier, "numeric=0.5")
    straight = train(TrainConfig(**{**options, "verifier": pair, "out": str(tmp_path / "a")}))
    half = {**options, "verifier": pair, "out": str(tmp_path / "b"), "steps": 6}

    class Stop(Exception):
        pass

    from kenpo.runs.callbacks import Callback

    class Halt(Callback):
        def on_checkpoint(self, step, path):
            if step == 2:
                raise Stop

    with pytest.raises(Stop):
        train(TrainConfig(**half), [Halt()])
    resumed = train(load(tmp_path / "b/config.json").but(out=str(tmp_path / "b"), resume=True, verifier_workers=1))
    assert resumed["eval"] == straight["eval"]
    lines = [(tmp_path / name / "samples.jsonl").read_text() for name in "ab"]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(("function", "words"), [("broken", "ZeroDivisionError"), ("hangs", "--time-limit")])
@pytest.mark.parametrize("held_out", ["0", "16"])
def test_a_verifier_that_fails_from_the_start_stops_the_run_in_seconds(run, files, function, words, held_out):
    began = time.monotonic()
    status, _, error = run(
        "--verifier", f"{files}/r.py:{function}", "--eval-problems", held_out, "--time-limit", "1.5", "--quiet",
        "--prompts", "20", "--group-size", "4",
    )  # fmt: skip
    assert status == 2
    assert time.monotonic() - began < 20  # one by one these would take 60 s and more
    assert error.count("\n") == 1
    assert f"r.py:{function}" in error
    assert words in error
    assert not (files / "run").exists()


def test_bad_weights_and_options_are_refused(run, files):
    for more, words in (
        (("--verifier", "numeric=nan"), "a weight is a finite number"),
        (("--verifier", "numeric", "exact", "numeric"), "two parts"),
        (("--verifier", "numeric", "nosuch=2"), "nosuch"),
        (("--verifier",), "name at least one"),
        (("--verifier-workers", "0"), "--verifier-workers"),
        (("--verifier-memory", "-1"), "--verifier-memory"),
    ):
        status, _, error = run(*more)
        assert status == 2, more
        assert words in error
        assert not (files / "run").exists()
