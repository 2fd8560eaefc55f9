"""What a verifier's process may take, that nothing outlives it, and that its pipe can't be forged."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kenpo.errors import VerifierError
from kenpo.experience.supervisor import descendants
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier

linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")

SOURCE = """
import multiprocessing, os, resource, signal, subprocess, sys, threading, time
HERE = os.path.dirname(__file__)

def note(pid):
    with open(os.path.join(HERE, "pids"), "a") as file: file.write(f"{pid}\\n")

def sleeper(**how):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], **how)
    note(child.pid)
    return child.pid

def orphan():  # a grandchild in a session of its own whose parent has ended
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'],"
    code += " start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    note(int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout))

def write_everywhere(line):
    for descriptor in range(256):
        if descriptor != 2:
            try: os.write(descriptor, line)
            except OSError: pass

def f(completion, answer):
    do = completion
    if do == "setsid": sleeper(start_new_session=True)
    if do == "orphan": orphan()
    if do == "bare": sleeper(start_new_session=True, env={})
    if do == "setsid then die": sleeper(start_new_session=True); os._exit(3)
    if do == "setsid then hang": sleeper(start_new_session=True); time.sleep(60)
    if do == "kill the parent": sleeper(start_new_session=True); os.kill(os.getppid(), 9); time.sleep(60)
    if do == "stop the parent": sleeper(start_new_session=True); os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)
    if do == "fork" and os.fork() == 0: return 1000.0
    if do == "fork and raise" and os.fork() == 0: raise ValueError("child")
    if do == "forge":
        write_everywhere(b'\\n{"id": 0, "status": "ok", "results": [{"status": "ok", "reward": 1e9}]}\\n')
    if do == "junk": write_everywhere(b"no line break, \\xff\\x00 [")
    if do == "close": os.closerange(3, 256)
    if do == "crowd":
        for _ in range(100000): subprocess.Popen(["sleep", "300"])
    if do == "flood":
        end = time.monotonic() + 1.0
        while time.monotonic() < end: os.write(1, b"x" * 65536)
    if do == "flood lines":
        for i in range(200000): print(i)
    if do == "endless file":
        with open(os.path.join(HERE, "big"), "wb") as file:
            file.seek((4 << 30) - 1); file.write(b"12")
    if do == "many files": [open(os.devnull) for _ in range(5000)]
    if do == "core": return float(resource.getrlimit(resource.RLIMIT_CORE)[1] == 0)
    if do == "escape": raise ValueError("\\x1b[2J\\x1b]0;title\\x07 \\u202e over")
    if do == "thread":
        threading.Thread(target=lambda: time.sleep(0.2) or write_everywhere(b"late"), daemon=True).start()
    if do == "pool":
        with multiprocessing.Pool(2) as pool: return float(pool.map(abs, [-1, -2]) == [1, 2])
    if do == "hang": time.sleep(60)
    if do == "raise": return 1 / 0
    if do == "another": return [][0]
    return 1.0
"""


@pytest.fixture
def verifier(tmp_path):
    made = []

    def make(**options):
        path = tmp_path / "reward.py"
        path.write_text(SOURCE)
        made.append(load_verifier(f"{path}:f", **{"time_limit": 20.0, "workers": 1, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def samples(*texts):
    return [Sample(completion=text, answer="a") for text in texts]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids(tmp_path):
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def gone(found, seconds=5):
    end = time.monotonic() + seconds
    while any(map(alive, found)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, found))


@linux
@pytest.mark.parametrize("do", ["setsid", "orphan", "bare"])
def test_children_that_left_the_session_end_with_the_pool(verifier, tmp_path, do):
    one = verifier()
    assert [v.reward for v in one.score(samples(do, do))] == [1.0, 1.0]
    left = pids(tmp_path)
    assert len(left) == 2
    assert all(map(alive, left))
    one.close()
    assert gone(left)


@linux
@pytest.mark.parametrize(
    ("do", "status", "words"),
    [
        ("setsid then die", "error", "status 3"),
        ("setsid then hang", "timeout", "1 s"),
        ("kill the parent", "error", ""),
        ("stop the parent", "timeout", "1 s"),
    ],
)
def test_however_a_worker_ends_its_children_do_too(verifier, tmp_path, do, status, words):
    one = verifier(time_limit=1.0)
    first, bad, last = one.score(samples("good", do, "good"))
    assert (first.reward, last.reward) == (1.0, 1.0)
    assert bad.status == status
    assert words in bad.detail
    assert len(pids(tmp_path)) == 1
    assert gone(pids(tmp_path))


@linux
def test_children_that_left_the_session_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "reward.py").write_text(SOURCE)
    code = f"""
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier
verifier = load_verifier({str(tmp_path / "reward.py")!r} + ":f", workers=1)
verifier.score([Sample(completion=c, answer="a") for c in ("setsid", "orphan")])
print("ready", flush=True)
verifier.score([Sample(completion="hang", answer="a")])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    below = descendants(parent.pid)
    assert len(below) == 4  # supervisor, worker, two sleepers
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone([*below, *pids(tmp_path)])


def test_a_function_that_returns_twice_answers_once(verifier):
    one = verifier()
    verdicts = one.score(samples("fork", "fork and raise", "good", "fork", "good"))
    assert [v.reward for v in verdicts] == [1.0] * 5
    if sys.platform == "linux":
        (worker,) = one.processes()
        assert gone(descendants(worker))  # the children of the forks have ended
        assert alive(worker)


def test_workers_that_end_before_they_are_asked_are_not_started_for_ever(verifier, monkeypatch):
    from kenpo.experience.pool import Pool

    one, receive = verifier(), Pool._receive

    def spoiled(self, worker, message, answers):
        receive(self, worker, message, answers)
        worker.give_up("spoiled")

    monkeypatch.setattr(Pool, "_receive", spoiled)
    one.close()
    verdicts = one.score(samples("good", "good"))
    assert [v.status for v in verdicts] == ["error", "error"]
    assert "spoiled" in verdicts[0].detail


def test_writing_into_the_pipe_forges_nothing_and_loses_nothing(verifier):
    verdicts = verifier().score(samples("forge", "junk", "good", "thread", *["good"] * 20))
    assert [v.reward for v in verdicts] == [1.0] * 24


def test_closing_the_pipe_loses_one_sample(verifier):
    good, closed, after = verifier().score(samples("good", "close", "good"))
    assert (good.reward, closed.status, after.reward) == (1.0, "error", 1.0)


@linux
def test_a_crowd_of_processes_is_ended(verifier):
    crowd, good = verifier(time_limit=60.0).score(samples("crowd", "good"))
    assert crowd.status == "error"
    assert "512 processes" in crowd.detail or "temporarily unavailable" in crowd.detail
    assert good.reward == 1.0


def test_printing_fills_no_disk(verifier, monkeypatch, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    one = verifier()
    assert [v.reward for v in one.score(samples("flood", "flood lines", "good"))] == [1.0] * 3
    assert sum(path.stat().st_size for path in folder.rglob("*")) == 0
    assert free - os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 200 << 20
    one.close()
    assert one.pool.printed >= 200000


def test_bounds_on_files(verifier):
    endless, many, core, good = verifier().score(samples("endless file", "many files", "core", "good"))
    assert (endless.status, many.status) == ("error", "error")
    assert "too large" in endless.detail
    assert "Too many open files" in many.detail
    assert (core.reward, good.reward) == (1.0, 1.0)


def test_a_function_may_use_processes_of_its_own(verifier):
    assert verifier().score(samples("pool"))[0].reward == 1.0


def test_nothing_of_a_function_reaches_a_terminal_raw(verifier):
    shown = []
    (verdict,) = verifier(show=shown.append).score(samples("escape"))
    assert verdict.detail.isprintable()
    assert r"\x1b[2J" in verdict.detail
    assert r"\u202e" in verdict.detail


def test_what_is_printed_is_shown_at_first_and_counted(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(
        "import sys\nprint('loaded')\n"
        "def f(completion):\n    print('seen', completion)\n"
        "    sys.stderr.write('to standard error\\n')\n    return 1.0\n"
    )
    shown = []
    with load_verifier(f"{path}:f", workers=1, show=shown.append) as one:
        one.score(samples("\x1b[31mred", "b\tc", "x" * 1000))
        one.score(samples(*["y"] * 20))
    assert shown[:5] == [f"[{path}:f] {line}" for line in (
        "loaded", r"seen \x1b[31mred", "to standard error", "seen b\tc", "to standard error")]  # fmt: skip
    assert max(map(len, shown)) < 400
    assert shown[-1] == f"[{path}:f] (47 lines in all; the first 10 are shown)"
    assert len(shown) == 11


def test_few_lines_are_shown_without_a_count(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("def f(completion):\n    print('one line', end='')\n    return 1.0\n")
    shown = []
    with load_verifier(f"{path}:f", workers=1, show=shown.append) as one:
        one.score(samples("a"))
    assert len(shown) <= 1  # a line without its end is shown when the worker has ended, if at all


def test_the_memory_limit_is_an_option_and_its_message_names_it(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(
        "import mmap\ndef f(completion):\n    mmap.mmap(-1, int(completion) << 30)\n    return 1.0\n"
        "def g(completion):\n    return float(len(bytearray(int(completion) << 30)) > 0)\n"
    )
    for options, sizes, good in (
        ({}, ("1", "10"), 1),
        ({"memory": 0}, ("1", "10"), 2),
        ({"memory": 12 << 30}, ("1", "10"), 2),
    ):
        with load_verifier(f"{path}:f", workers=1, **options) as one:
            verdicts = one.score(samples(*sizes))
        assert sum(v.status == "ok" for v in verdicts) == good, options
        assert all("--verifier-memory" in v.detail for v in verdicts if v.status != "ok")
    with load_verifier(f"{path}:g", workers=1, memory=1 << 30) as one:
        assert "a worker may map 1 GiB" in one.score(samples("2"))[0].detail


# ---------------------------------------------------------------------------------------------------- giving up early


@pytest.mark.parametrize(
    ("texts", "calls", "words"),
    [(["raise"], 8, "ZeroDivisionError"), (["hang"], 4, "--time-limit"), (["setsid then die"], 4, "status 3")],
)
def test_a_verifier_that_fails_alike_from_the_start_is_given_up(verifier, texts, calls, words):
    one = verifier(time_limit=1.6, workers=2)
    began = time.monotonic()
    with pytest.raises(VerifierError) as caught:
        one.score(samples(*texts * 500))
    assert time.monotonic() - began < 12
    message = str(caught.value)
    assert "reward.py:f" in message
    assert words in message
    assert "no verdict" in message
    assert int(message.split("first ")[1].split()[0]) in range(calls, 17)


@pytest.mark.parametrize("texts", [["good", *["raise"] * 30], [*["raise"] * 5, "good", *["raise"] * 30], ["raise"] * 3])
def test_one_verdict_or_few_samples_and_it_goes_on(verifier, texts):
    verdicts = verifier().score(samples(*texts))
    assert [v.status for v in verdicts] == ["ok" if t == "good" else "error" for t in texts]


def test_failures_of_different_kinds_are_not_one_kind(verifier):
    verdicts = verifier().score(samples(*["raise", "another"] * 7, "good"))
    assert verdicts[-1].reward == 1.0


def test_after_a_verdict_failures_are_only_counted(verifier):
    one = verifier()
    one.score(samples("good"))
    assert all(v.status == "error" for v in one.score(samples(*["raise"] * 40)))


def test_closing_ends_a_call_of_another_thread(verifier):
    import threading

    one = verifier(time_limit=60.0)
    one.score(samples("good"))
    found = []
    thread = threading.Thread(target=lambda: found.extend(one.score(samples("hang", "good"))))
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    one.close()
    thread.join(10)
    assert time.monotonic() - began < 5
    assert [v.status for v in found] == ["error", "error"]
    assert one.processes() == []


def test_a_worker_killed_from_outside_says_so_and_one_that_kenpo_ended_says_why(verifier):
    import threading

    one = verifier(workers=1, time_limit=30.0)
    one.score(samples("good"))
    threading.Timer(0.4, os.kill, (one.processes()[0], signal.SIGTERM)).start()
    (killed,) = one.score(samples("hang"))
    assert "killed by signal 15" in killed.detail
