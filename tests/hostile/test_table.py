"""The cases of cases.toml, one by one: exit status, one line that says what is wrong, and nothing left behind."""

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from kenpo.cli import main

TABLE = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())["case"]
TRAIN = ["train", "--model", "model", "--task", "task.jsonl", "--steps", "1", "--prompts", "2", "--group-size", "2",
         "--max-tokens", "4", "--eval-problems", "2", "--threads", "1", "--quiet"]  # fmt: skip
SHORT = {"TRAIN": TRAIN, "EVAL": ["eval", "model", "--task", "task.jsonl"]}


def fill(value, x):
    """The value with {x} replaced, at whatever depth."""
    if isinstance(value, str):
        return value.replace("{x}", x)
    if isinstance(value, list):
        return [fill(v, x) for v in value]
    if isinstance(value, dict):
        return {fill(k, x): fill(v, x) for k, v in value.items()}
    return value


def cases():
    """One parameter for each case and each of its values."""
    for case in TABLE:
        for i, x in enumerate(case.get("x", [""])):
            marks = [] if case.get("quick") and i < 2 else [pytest.mark.hostile]
            shown = x if x.isprintable() and len(x) < 30 else str(i)
            yield pytest.param({k: fill(v, x) for k, v in case.items() if k != "x"}, marks=marks,
                               id=f"{case['name']}-{shown}" if shown else case["name"])  # fmt: skip


def lay_out(case, models, folder):
    shutil.copytree(models / "qwen3", folder / "model")
    lines = ({"prompt": f"{n}+1=", "answer": n + 1} for n in range(10))
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path, keys in case.get("edit", {}).items():
        file = folder / "model" / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    for path in case.get("remove", ()):
        (folder / "model" / path).unlink()
    for path, text in case.get("files", {}).items():
        (folder / path).write_text(text)


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("case", list(cases()))
def test_case(case, models, tmp_path, monkeypatch, capfd):
    lay_out(case, models, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    before = content(tmp_path)
    command = [word for arg in case["run"] for word in SHORT.get(arg, [arg])]
    capfd.readouterr()
    assert main(command) == case["exit"]
    out, error = capfd.readouterr()
    assert error.count("\n") == 1, error
    assert error.startswith("kenpo ")
    assert case["says"] in error
    assert "Traceback" not in error + out
    assert "\x1b" not in error + out
    after = content(tmp_path)
    assert {p: after.get(p) for p in before} == before
    left = {p.relative_to(tmp_path).parts[0] for p in after if p not in before}
    assert left <= {"hub", "__pycache__"}, left
    assert not (tmp_path / "runs").exists()


def test_a_task_that_is_a_pipe(models, tmp_path, capfd):
    lay_out({}, models, tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert main(["train", "--model", str(tmp_path / "model"), "--task", str(tmp_path / "pipe.jsonl")]) == 2
    assert "no ordinary file" in capfd.readouterr().err
