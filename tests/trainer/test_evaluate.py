"""Held-out accuracy and pass@k; `kenpo eval` and `kenpo sample`."""

import io
import json
import math

import pytest

from kenpo.cli import main
from kenpo.engines.base import SamplingOptions
from kenpo.errors import InputError, VerifierError
from kenpo.experience.estimates import pass_at_k
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.files import set_names
from kenpo.experience.problem import Problem
from kenpo.ranks import Ranks

from .stubs import Engine, Prompts, Verifier


def test_pass_at_k_by_counting():
    """1 − C(n−c,k)/C(n,k) is the share of k-subsets that hold a correct sample."""
    from itertools import combinations

    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations(range(n), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets), abs=1e-15)
    assert pass_at_k(20, 12, 4) == pytest.approx(0.9855521155830753, abs=1e-15)
    assert pass_at_k(8, 0, 8) == 0.0
    with pytest.raises(InputError):
        pass_at_k(4, 1, 5)


def evaluator(reward, n=4, batch=3):
    problems = [Problem(i, f"p{i}", i) for i in range(n)]
    return Evaluator(problems, Engine(), Prompts(), Verifier(reward), Ranks(), SamplingOptions(), batch=batch)


def test_samples_without_verdict_leave_the_denominators():
    """Problem 0: two right; 1: one right, one without verdict; 2: none judged; 3: two wrong."""
    table = {0: [1, 1], 1: [1, math.nan], 2: [math.nan, math.nan], 3: [0, 0]}
    outcome, records = evaluator(lambda answer, i: float(table[answer][i % 2])).run(samples=2, greedy=False)
    assert (outcome.correct, outcome.judged, outcome.no_verdict) == (3, 5, 3)
    assert outcome.accuracy == 3 / 5
    assert outcome.per_problem == [(2, 2), (1, 1), (0, 0), (2, 0)]
    assert outcome.pass_at(1) == (2.0, 3)
    assert outcome.pass_at(2) == (1.0, 2)
    assert outcome.metrics()["eval/no_verdict"] == {"sum": 3, "count": 8}
    assert len(records) == 8


def test_nothing_judged_is_an_error():
    with pytest.raises(VerifierError, match="held-out"):
        evaluator(lambda answer, i: math.nan).run()


def test_eval_prints_accuracy_and_pass_at_k(models, capsys):
    argv = [
        "eval",
        str(models / "qwen3"),
        "--problems",
        "7",
        "--max-tokens",
        "6",
        "--samples",
        "4",
        "--k",
        "1",
        "4",
        "--threads",
        "1",
    ]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["sets"]["addition"]
    assert found["problems"] == found["greedy"]["judged"] == 7
    assert found["pass@k"].keys() == {"1", "4"}
    assert found["greedy"]["accuracy"] == found["greedy"]["correct"] / 7
    assert found["avg@k"]["k"] == found["maj@k"]["k"] == 4
    assert main([*argv, "--batch", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert main(argv) == 0
    head, titles, row = capsys.readouterr().out.splitlines()
    assert "95 % intervals" in head
    assert titles.split()[:6] == ["set", "problems", "greedy", "avg@4", "maj@4", "pass@1"]
    assert row.startswith("addition")
    assert f"{found['avg@k']['mean']:.4f} [{found['avg@k']['low']:.3f}" in row


def test_each_of_several_sets_has_the_figures_that_it_has_alone(models, capsys, tmp_path):
    argv = ["eval", str(models / "qwen3"), "--max-tokens", "4", "--samples", "3", "--threads", "1", "--json"]
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for n, file in enumerate(files):
        rows = [{"prompt": f"{i}+{n}=", "answer": str(i % 3)} for i in range(5 + n)]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main([*argv, "--task", *map(str, files), "--correct-at", "0"]) == 0
    both = json.loads(capsys.readouterr().out)["sets"]
    assert {name: found["problems"] for name, found in both.items()} == {"one": 5, "two": 6}
    for file in files:
        assert main([*argv, "--task", str(file), "--correct-at", "0"]) == 0
        assert json.loads(capsys.readouterr().out)["sets"] == {file.stem: both[file.stem]}


def test_sets_are_told_apart():
    assert set_names(["a/test.jsonl", "b.csv.gz", "addition"]) == ["test", "b", "addition"]
    assert set_names(["a/test.jsonl", "b/test.jsonl"]) == ["a/test.jsonl", "b/test.jsonl"]
    with pytest.raises(InputError, match="given twice"):
        set_names(["a.jsonl", "a.jsonl"])


def test_eval_refuses_bad_input(models, capsys):
    for argv, what in (
        (["--k", "3"], "--k 3"),
        (["--problems", "0"], "--problems"),
        (["--task", "addition", "addition"], "given twice"),
        (["--task", "addition", "b.jsonl", "--eval-file", "c.jsonl"], "--eval-file"),
        (["--task", "nosuch"], "nosuch"),
        (["--temperature", "0"], "temperature"),
    ):
        assert main(["eval", str(models / "qwen3"), *argv]) == 2
        error = capsys.readouterr().err
        assert what in error
        assert error.count("\n") == 1
    assert main(["eval", "--task", "addition"]) == 2
    assert "name the model first" in capsys.readouterr().err


def test_sample_answers_a_prompt_and_a_pipe(models, capsys, monkeypatch):
    argv = ["sample", str(models / "qwen3"), "--max-tokens", "5"]
    assert main([*argv, "--prompt", "1+2=", "--samples", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["1+2=", "1+2="]
    assert all(line["tokens"] <= 5 and line["logp"] < 0 for line in lines)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n\n3+4=\n"))
    assert main([*argv, "--greedy"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
