"""Several held-out sets in one run."""

import json

from kenpo.trainer.config import TrainConfig, load
from kenpo.trainer.loop import train


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write(path, start, n):
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_figures_of_two_sets_in_one_run_are_those_of_two_runs(options, tmp_path, capsys):
    task = write(tmp_path / "data.jsonl", 10, 12)
    files = [write(tmp_path / "low.jsonl", 2, 6), write(tmp_path / "high.jsonl", 40, 4)]
    options |= {"task": task, "steps": 2, "eval_every": 1, "eval_problems": 5, "quiet": False, "loggers": ()}
    runs = {}
    for name, given in (("both", files), ("low", files[0]), ("high", files[1])):
        train(TrainConfig(**options, eval_file=given, out=str(tmp_path / name)))
        runs[name] = rows_of(tmp_path / name)
    assert "low: the first 5 of 6 rows are evaluated" in capsys.readouterr().err
    for step, row in enumerate(runs["both"]):
        for figure in ("accuracy", "reward", "length", "truncated", "no_verdict"):
            alone = {name: runs[name][step][f"eval/{figure}"] for name in ("low", "high")}
            assert alone == {name: row[f"eval/{name}/{figure}"] for name in alone}
            whole = {part: alone["low"][part] + alone["high"][part] for part in ("sum", "count")}
            assert row[f"eval/{figure}"] == whole
    assert runs["both"][0]["eval/low/accuracy"]["count"] == 5
    assert runs["both"][0]["eval/high/accuracy"]["count"] == 4
    assert load(tmp_path / "both/config.json").eval_file == tuple(files)


def test_eval_files_and_data_files_are_words_of_the_command_line(tmp_path, monkeypatch):
    from kenpo.commands.training import read_config

    monkeypatch.chdir(tmp_path)
    config = read_config(["--task", "a.jsonl", "b.csv.gz", "--eval-file", "c.jsonl", "--eval-file", "hub:x/y:test"])
    assert config.task == ("a.jsonl", "b.csv.gz")
    assert config.eval_file == ("c.jsonl", "hub:x/y:test")
    whole = config.whole()
    assert whole.task == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv.gz"))
    assert whole.eval_file == (str(tmp_path / "c.jsonl"), "hub:x/y:test")
    assert read_config(["--task", "reasoning_gym:gcd"]).whole().task == "reasoning_gym:gcd"
    (tmp_path / "addition").mkdir()
    assert read_config([]).whole().task == "addition"
