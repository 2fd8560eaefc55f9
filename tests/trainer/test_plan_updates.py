"""A schedule that belongs to an algorithm is kept or refused."""

from __future__ import annotations

from kenpo.cli import main


def test_more_updates_per_batch_than_the_algorithm_takes_are_refused(capsys):
    assert main(["train", "--algorithm", "online_icepop", "--minibatches", "2", "--dry-run"]) == 2
    assert "at most 1 update" in capsys.readouterr().err
    assert main(["train", "--algorithm", "online_icepop", "--dry-run"]) == 0


def test_the_limit_is_shown_and_told_apart(capsys):
    assert main(["show", "online_icepop"]) == 0
    assert "updates: at most 1 optimizer step" in capsys.readouterr().out
    assert main(["diff", "icepop", "online_icepop", "--json"]) == 0
    assert capsys.readouterr().out.split() == ["{", '"updates":', "[", "null,", "1", "]", "}"]
