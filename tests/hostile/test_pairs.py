"""Pairs of processes started at random moments on one folder: one runs, the other is refused in one line.

In half of the pairs the owner is killed by SIGKILL at a random moment and the command is given again. However it went,
the run's files equal those of a run that was left alone.
"""

import random
import re
import signal
import time

import pytest

from kenpo.cli import main
from tests.trainer.test_resume import killed_run, same_end

REFUSED = re.compile(r"process \d+ on \S+ is at work on this run since|another process is at work|exists already")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that nobody disturbed, made once."""
    made = {}

    def run(options):
        if not made:
            made["run"] = tmp_path_factory.mktemp("alone") / "run"
            assert main([*killed_run(options), "--out", str(made["run"])]) == 0
        return made["run"]

    return run


def commands(kind, options, run):
    """The command of each of the two, and the one that goes on after a kill."""
    argv = killed_run(options)
    resume = ["train", "--resume", run, "--quiet"]
    if kind == "series":
        return [*argv, "--series", run], [*argv, "--series", run], [*argv, "--series", run]
    if kind == "fresh":
        return [*argv, "--out", run], [*argv, "--out", run], resume
    return [*argv, "--out", run], resume, resume


def pair(kind, number, spawn, options, alone, run):
    moments = random.Random(f"{kind}/{number}")
    first, second, again = commands(kind, options, run)
    owner = spawn(*first)
    if kind == "resume":  # there is something to resume once the folder is a run
        while owner.poll() is None and not (run / "config.json").exists():
            time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.2 if number % 2 else 2.0))
    other = spawn(*second)
    if number % 2:
        while owner.poll() is None and other.poll() is None and not (run / "config.json").exists():
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.6))
        for process in (owner, other):  # whichever of the two it is
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if not (run / "config.json").exists():
            again = first
        last = spawn(*again)
        _, error = last.communicate(timeout=120)
        assert last.returncode == 0, error
    else:
        statuses = []
        for process in (owner, other):
            out, error = process.communicate(timeout=120)
            statuses.append(process.returncode)
            if process.returncode:
                assert process.returncode in (1, 2), error
                assert error.count("\n") == 1, error
                assert REFUSED.search(error), error
                assert not out
        assert statuses.count(0) >= 1
        if kind != "resume":
            assert statuses.count(0) == 1 or run.with_name(f"{run.name}-2").exists()
    assert not (run / "lock").exists()
    same_end(run, alone(options))


@pytest.mark.hostile
@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("kind", ["series", "fresh", "resume"])
def test_a_pair_on_one_folder(kind, number, spawn, options, alone, tmp_path):
    pair(kind, number, spawn, options, alone, tmp_path / "run")


def test_one_pair(spawn, options, alone, tmp_path):
    """The quick one: a second `make train` beside a run at work, then the owner killed and the command given again."""
    run = tmp_path / "run"
    first, second, again = commands("series", options, run)
    owner = spawn(*first)
    while owner.poll() is None and not (run / "config.json").exists():
        time.sleep(0.002)
    owner.send_signal(signal.SIGSTOP)  # at work for as long as it takes
    other = spawn(*second)
    out, error = other.communicate(timeout=120)
    assert other.returncode == 1, error
    assert f"process {owner.pid} on " in error
    assert error.count("\n") == 1
    assert not out
    owner.kill()
    owner.communicate()
    last = spawn(*again)
    _, error = last.communicate(timeout=120)
    assert last.returncode == 0, error
    same_end(run, alone(options))
