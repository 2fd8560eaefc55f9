"""A schedule that belongs to an algorithm is kept or refused."""

from __future__ import annotations

from kenpo.cli import main


def test_more_updates_per_batch_than_the_algorithm_takes_are_refused(capsys):
    assert main(["train", "--algorithm", "online_icepop", "--minibatches", "2", "--dry-run"]) == 2
    assert "at most 1 update" in capsys.readouterr().err
    assert main(["train", "--algorithm", "online_icepop", "--dry-run"]) == 0
