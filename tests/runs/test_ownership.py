"""One process owns a run's folder: who is refused, who takes over from a dead owner, and what is left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kenpo.errors import RunError
from kenpo.runs import ownership
from kenpo.runs.folder import RunFolder, next_in_series
from kenpo.runs.ownership import SILENCE, Claim, InUseError, machine, start_of

OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from kenpo.runs.ownership import Claim
claim = Claim(Path(sys.argv[1]), create=True)
read, write = os.pipe()
def fork():
    child = os.fork()
    if not child:
        os.write(write, b"1")  # it runs
        time.sleep(60)
    os.read(read, 1)
    return child
children = {
    "none": lambda: 0,
    "fork": fork,
    "popen": lambda: subprocess.Popen(["sleep", "60"], close_fds=False).pid,
}
child = children[sys.argv[2]]()
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """Start a process that claims `run`, with a child of the given kind: (process, the child's id)."""
    started = []

    def start(kind="none"):
        command = [sys.executable, "-c", OWNER, str(tmp_path / "run"), kind]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        child = int(process.stdout.readline())
        started.append(child)
        return process, child

    yield start
    for process in reversed(started):  # children first: they hold the pipe
        if isinstance(process, int):
            if process:
                os.kill(process, signal.SIGKILL)
        else:
            process.kill()
            process.communicate()


def record_of(path, **changes):
    """Write the record of some other owner into the lock file of `path`."""
    path.mkdir()
    record = {"pid": 4242, "host": "elsewhere", "machine": "m-2", "since": "2026-01-02T03:04:05+00:00", "token": "t"}
    (path / "lock").write_text(json.dumps({**record, **changes}))


def test_the_second_is_told_who_works_there(owner, tmp_path):
    process, _ = owner()
    began = time.monotonic()
    with pytest.raises(InUseError) as refused:
        Claim(tmp_path / "run")
    assert time.monotonic() - began < 1
    text = str(refused.value)
    assert f"process {process.pid} on " in text
    assert " UTC" in text
    assert "\n" not in text


def test_one_process_does_not_take_its_own_folder_twice(tmp_path):
    claim = Claim(tmp_path / "run", create=True)
    with pytest.raises(InUseError, match=f"process {os.getpid()} "):
        Claim(tmp_path / "run")
    claim.release()
    Claim(tmp_path / "run", create=True).release()


@pytest.mark.parametrize("child", ["none", "fork", "popen"])
def test_a_killed_owner_leaves_the_folder_free_though_its_children_live(child, owner, tmp_path):
    process, child_id = owner(child)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if child != "none":
        os.kill(child_id, 0)  # it lives
    assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == process.pid
    Claim(tmp_path / "run").release()


def test_folders_made_for_a_claim_go_with_it(tmp_path):
    Claim(tmp_path / "a" / "b" / "run", create=True).release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    Claim(tmp_path / "run", create=True).release()
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    claim = Claim(tmp_path / "run" / "inner", create=True)
    (tmp_path / "run" / "inner" / "config.json").write_text("{}")
    claim.release()
    assert [p.name for p in (tmp_path / "run" / "inner").iterdir()] == ["config.json"]


def test_an_owner_on_another_machine(tmp_path):
    run, lock = tmp_path / "run", tmp_path / "run" / "lock"
    record_of(run)
    os.utime(lock, (time.time() - SILENCE + 10,) * 2)
    with pytest.raises(InUseError, match=r"process 4242 on elsewhere .* since 2026-01-02 03:04:05 UTC.* free in \d+ s"):
        Claim(run)
    os.utime(lock, (time.time() - SILENCE - 1,) * 2)
    claim = Claim(run)
    assert json.loads(lock.read_text())["pid"] == os.getpid()
    claim.release()
    assert not list(run.iterdir())


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "BEAT", 0.02)
    claim = Claim(tmp_path / "run", create=True)
    os.utime(claim.path, (1.0, 1.0))
    for _ in range(200):
        if claim.path.stat().st_mtime > 1.0:
            break
        time.sleep(0.02)
    assert time.time() - claim.path.stat().st_mtime < 60
    claim.release()


def test_a_record_of_this_machine_without_a_lock_is_a_dead_owners(tmp_path):
    record_of(tmp_path / "run", machine=machine(), pid=os.getpid(), process=start_of(os.getpid()))
    Claim(tmp_path / "run").release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(code, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ownership.fcntl, "flock", none)
    mine = {"machine": machine(), "pid": os.getpid()}
    record_of(tmp_path / "alive", **mine, process=start_of(os.getpid()))
    with pytest.raises(InUseError, match=f"process {os.getpid()} on"):
        Claim(tmp_path / "alive")
    record_of(tmp_path / "again", **mine, process="1")  # the number of a dead process, given out again
    Claim(tmp_path / "again").release()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record_of(tmp_path / "gone", machine=machine(), pid=gone.pid, process="1")
    Claim(tmp_path / "gone").release()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}', "\0" * 100])
def test_a_damaged_record_says_nothing(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(text)
    Claim(tmp_path / "run").release()


@pytest.mark.parametrize("how", ["removed", "taken"])
def test_an_owner_that_lost_its_folder_writes_nothing_more(how, tmp_path):
    run = tmp_path / "run"
    with RunFolder(run, claim=Claim(run, create=True)) as folder:
        folder.create({})
        folder.append("metrics.jsonl", [{"step": 0}])
        if how == "removed":
            (run / "lock").unlink()
        else:
            (run / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "machine": "m-2"}))
        with pytest.raises(RunError, match="nothing more is written"):
            folder.append("metrics.jsonl", [{"step": 1}])
    assert (run / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert (run / "lock").exists() == (how == "taken")  # it is the other one's


def test_a_start_that_died_is_started_again(tmp_path, owner):
    process, _ = owner()
    process.kill()
    process.wait()
    assert next_in_series(tmp_path / "run") == (tmp_path / "run", False)
    with RunFolder(tmp_path / "run", claim=Claim(tmp_path / "run", create=True)) as folder:
        folder.create({})
    assert next_in_series(tmp_path / "run") == (tmp_path / "run", True)
