"""The user's function in worker processes: whatever it does, the other samples keep their verdicts."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from kenpo.errors import InputError, UnknownNameError
from kenpo.experience.pool import Pool
from kenpo.experience.tasks import load_task
from kenpo.experience.verifiers import Sample, load_verifier

REWARD = """
import os, subprocess, sys, time
import numpy

class Liar:
    def __eq__(self, other): return True
    def __float__(self): return 1.0

def reward(completion, answer, prompt=None, level=None, truncated=None):
    print("noise on", "stdout")
    print('{"id": 0, "status": "ok", "reward": 1.0}', flush=True)
    print("noise on stderr", file=sys.stderr)
    do = completion
    if do == "hang": time.sleep(60)
    if do == "spin":
        while True: pass
    if do == "raise": return 1 / 0
    if do == "exit": sys.exit(3)
    if do == "hard exit":
        print("last words", flush=True)
        os._exit(3)
    if do == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        with open(os.path.join(os.path.dirname(__file__), "child.pid"), "w") as file: file.write(str(child.pid))
        time.sleep(60)
    if do == "stdin": return float(sys.stdin.read() == "")
    if do == "memory": return len(bytearray(1 << 40))
    if do == "recursion": return reward("recursion", answer)
    return {
        "none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "liar": Liar(), "list": [1],
        "numpy": numpy.float32(0.5), "array": numpy.ones(2), "int": 1, "bool": True,
        "dict": {"reward": 0.75, "format": 1, "length": None}, "no reward": {"score": 1.0},
        "level": level, "prompt": len(prompt), "truncated": truncated,
        "echo": float(answer == completion),
    }.get(do, float(do == answer))
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "my_reward.py").write_text(REWARD)
    return f"{tmp_path / 'my_reward.py'}:reward"


def samples(*completions, answer="good", **more):
    return [Sample(completion=text, answer=answer, **more) for text in completions]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_whatever_a_function_does_is_a_status_and_the_others_keep_their_verdicts(spec):
    expected = {
        "good": (1.0, "ok", ""), "bad": (0.0, "ok", ""), "int": (1.0, "ok", ""), "bool": (1.0, "ok", ""),
        "numpy": (0.5, "ok", ""), "dict": (0.75, "ok", ""), "stdin": (1.0, "ok", ""), "prompt": (6.0, "ok", ""),
        "raise": (None, "error", "ZeroDivisionError: division by zero (my_reward.py, line 17)"),
        "exit": (None, "error", "SystemExit"), "hard exit": (None, "error", "exited with status 3"),
        "none": (None, "abstain", "None"), "nan": (None, "abstain", "NaN"), "inf": (None, "error", "inf"),
        "text": (None, "error", "a str, not a number"), "liar": (None, "error", "a Liar, not a number"),
        "list": (None, "error", "list"), "array": (None, "error", ""), "no reward": (None, "error", "no 'reward'"),
        "memory": (None, "error", "MemoryError"), "recursion": (None, "error", "RecursionError"),
    }  # fmt: skip
    with load_verifier(spec, time_limit=20.0) as verifier:
        verdicts = verifier.score(samples(*expected, prompt="prompt"))
        for i, ((name, (reward, status, words)), verdict) in enumerate(zip(expected.items(), verdicts, strict=True)):
            assert verdict.status == status, (name, verdict)
            assert words in verdict.detail, (name, verdict)
            assert math.isnan(verdict.reward) if reward is None else verdict.reward == reward, (name, verdict)
            if status == "error":
                assert f"sample {i}:" in verdict.detail
                assert "\n" not in verdict.detail
        assert "last words" in verdicts[list(expected).index("hard exit")].detail
        parts = verdicts[list(expected).index("dict")].parts
        assert parts["format"] == 1.0
        assert math.isnan(parts["length"])
        assert len(verifier.processes()) == 2


def test_a_hung_sample_costs_its_time_limit_and_nothing_else(spec):
    with load_verifier(spec, time_limit=1.0) as verifier:
        verifier.score(samples("good", "good"))
        start = time.monotonic()
        verdicts = verifier.score(samples("good", "good", "hang", "bad"))
        assert time.monotonic() - start < 5
        assert [v.status for v in verdicts] == ["ok", "ok", "timeout", "ok"]
        assert "1 s" in verdicts[2].detail


def test_stuck_workers_are_killed_with_their_children_and_the_count_is_back(spec, tmp_path):
    with load_verifier(spec, time_limit=1.0) as verifier:
        verifier.score(samples("good", "good"))
        before = verifier.processes()
        verdicts = verifier.score(samples("child", "spin", "hang", "good"))
        assert [v.status for v in verdicts] == ["timeout", "timeout", "timeout", "ok"]
        after = verifier.processes()
        assert len(after) == 2
        assert gone(before)
        assert gone([int((tmp_path / "child.pid").read_text())])
    assert gone(after)
    assert verifier.processes() == []


def test_a_worker_killed_from_outside_loses_only_its_own_sample(spec):
    with load_verifier(spec, time_limit=30.0) as verifier:
        verifier.score(samples("good", "good"))
        victim = verifier.processes()[0]
        timer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
        timer.start()
        verdicts = verifier.score(samples("hang", *["good"] * 50))
        assert len(verifier.processes()) == 2
    assert verdicts[0].status == "error"
    assert "signal 9" in verdicts[0].detail
    assert all(v.reward == 1.0 for v in verdicts[1:])


def test_a_stopped_worker_blocks_nobody(spec):
    with load_verifier(spec, time_limit=1.0) as verifier:
        verifier.score(samples("good", "good"))
        os.kill(verifier.processes()[0], signal.SIGSTOP)
        verdicts = verifier.score(samples("x" * 10**6, "y" * 10**6, answer="x" * 10**6))
    assert sorted(v.status for v in verdicts) == ["ok", "timeout"]


def test_two_threads_score_at_once(spec):
    found = {}
    with load_verifier(spec) as verifier:

        def work(name):
            found[name] = verifier.score(samples(*[name if i % 2 else "no" for i in range(100)], answer=name))

        threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 4
    for verdicts in found.values():
        assert [v.reward for v in verdicts] == [0.0, 1.0] * 50


def test_a_batch_of_cheap_samples_is_quick(spec):
    with load_verifier(spec) as verifier:
        verifier.score(samples("good", "good"))
        start = time.monotonic()
        assert all(v.reward == 1.0 for v in verifier.score(samples(*["good"] * 128)))
        assert time.monotonic() - start < 1.0


def test_columns_unicode_and_large_samples_arrive_as_they_are(spec):
    odd = "\ud800 \u2028 \0 \n 🙂 é"
    with load_verifier(spec) as verifier:
        (level,) = verifier.score(samples("level", extra={"level": 3, "unknown": 1}, prompt=[]))
        (cut,) = verifier.score(samples("truncated", truncated=True))
        (same,) = verifier.score(samples(odd, answer=odd))
        (large,) = verifier.score(samples("🙂" * 10**6, answer="🙂" * 10**6))
        nested = [[[{"a": [None, True, 1.5]}]]]
        (deep,) = verifier.score(samples("x", answer=nested))
        (unsendable,) = verifier.score(samples("x", extra={"level": object()}))
        assert verifier.score([]) == []
    assert (level.reward, cut.reward, same.reward, large.reward, deep.reward) == (3.0, 1.0, 1.0, 1.0, 0.0)
    assert unsendable.status == "error"
    assert "JSON" in unsendable.detail


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def reward(completion, answer:\n  pass", ["SyntaxError", "line 1"]),
        ("x = 1\nimport no_such_module_anywhere", ["no_such_module_anywhere", "line 2"]),
        ("def other(completion, answer): pass", ["no function 'reward'", "other"]),
        ("reward = 3", ["int, not a function"]),
        ("def reward(answer): pass", ["takes no completion"]),
        ("class reward:\n  def __init__(self, completion, answer): pass", ["is a class"]),
        ("import sys\nsys.exit(4)", ["SystemExit", "line 2"]),
        ("import os\nos._exit(4)", ["status 4"]),
        ("import os\nos.kill(os.getpid(), 9)", ["signal 9"]),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(tmp_path, code, words):
    path = tmp_path / "r.py"
    path.write_text(code)
    with pytest.raises(InputError) as caught:
        load_verifier(f"{path}:reward")
    assert "\n" not in str(caught.value)
    for word in [*words, "r.py:reward"]:
        assert word in str(caught.value)


def test_what_a_worker_said_outlives_its_end(tmp_path, monkeypatch):
    """It may have ended by the time its message has been read."""
    exchange = Pool._exchange

    def then_wait(self, answers):
        exchange(self, answers)
        if self._failure:
            assert [w.supervisor.wait(timeout=20) for w in self._workers] == [0]

    monkeypatch.setattr(Pool, "_exchange", then_wait)
    path = tmp_path / "r.py"
    path.write_text("def other(completion, answer): pass")
    with pytest.raises(InputError, match="no function 'reward'"):
        load_verifier(f"{path}:reward")


def test_names_and_numbers_that_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean numeric"):
        load_verifier("numerc")
    with pytest.raises(InputError, match="no such file"):
        load_verifier(f"{tmp_path}/none.py:f")
    with pytest.raises(InputError, match=r"my\.py:reward"):
        load_verifier("my.py")
    with pytest.raises(InputError, match="time limit"):
        load_verifier("numeric", time_limit=0)
    with pytest.raises(InputError, match="workers"):
        load_verifier("numeric", workers=0)
    with pytest.raises(InputError, match="reasoning_gym"):
        load_verifier("reasoning_gym")


def test_argument_styles(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(
        textwrap.dedent("""
        def by_name(answer, completion): return float(completion == "c" and answer == "a")
        def by_position(text, /, gold): return float(text == "c" and gold == "a")
        def anything(*args, **kwargs): return float(args == ("c", "a") and kwargs["level"] == 2)
        def keywords(**row): return float(row["completion"] == "c" and row["answer"] == "a" and row["level"] == 2)
        class Callable:
            def __call__(self, completion, answer, *, level): return float(level == 2)
        instance = Callable()
        """)
    )
    for name in ("by_name", "by_position", "anything", "keywords", "instance"):
        with load_verifier(f"{path}:{name}", workers=1) as verifier:
            extra = {"level": 2, "answer": "no", "completion": "no"}
            (verdict,) = verifier.score([Sample(completion="c", answer="a", prompt="p", extra=extra)])
            assert verdict.reward == 1.0, (name, verdict)


def test_workers_end_with_the_parent(spec, tmp_path):
    code = f"""
import time
from kenpo.experience.pool import Pool
from kenpo.experience.verifiers import Sample, load_verifier
verifier = load_verifier({spec!r}, time_limit=100.0)
verifier.score([Sample(completion="x", answer="y")] * 2)
print(*verifier.processes(), flush=True)
verifier.score([Sample(completion="hang", answer="y"), Sample(completion="child", answer="y")])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    end = time.monotonic() + 20
    while not (tmp_path / "child.pid").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone([*pids, int((tmp_path / "child.pid").read_text())])


def test_reasoning_gym_scores_by_the_dataset_of_the_problem():
    pytest.importorskip("reasoning_gym")
    task = load_task("reasoning_gym:chain_sum")
    problem = task.train(0)

    def sample(completion, **more):
        values = {"prompt": problem.prompt, "extra": problem.extra, **more}
        return Sample(completion=completion, answer=problem.answer, **values)

    with load_verifier(task.verifier, task=task, workers=1) as verifier:
        right, wrong, other, foreign = verifier.score(
            [
                sample(f"Thinking… <answer>{problem.answer}</answer>"),
                sample("<answer>no</answer>"),
                sample(str(problem.answer), prompt="another question"),
                sample(str(problem.answer), extra={}),
            ]
        )
    assert right.reward == 1.0
    assert wrong.reward < 0.5
    assert (other.status, foreign.status) == ("error", "error")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_reasoning_gym_dataset_makes_and_scores_a_problem():
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    tasks = [load_task(f"reasoning_gym:{name}") for name in sorted(set(DATASETS) - {"composite"})]
    problems = [task.train(0) for task in tasks]
    asked = [
        Sample(completion=f"<answer>{p.answer}</answer>", answer=p.answer, prompt=p.prompt, extra=p.extra)
        for p in problems
    ]
    with load_verifier("reasoning_gym", task=tasks[0], time_limit=60.0) as verifier:
        verdicts = verifier.score(asked)
    bad = [
        (task.name, verdict, p.answer)
        for task, p, verdict in zip(tasks, problems, verdicts, strict=True)
        # where several answers are right the dataset names none
        if verdict.status != "ok" or (p.answer is not None and len(p.answer) < 500 and verdict.reward != 1.0)
    ]
    assert bad == []
