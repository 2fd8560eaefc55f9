"""Tasks from files and reasoning_gym: columns, splits, streams, and one clear line for each kind of bad data."""

import json
import subprocess
import sys

import pytest

from kenpo.errors import InputError, UnknownNameError
from kenpo.experience.problem import Problem
from kenpo.experience.tasks import Task, load_task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(n):
    return [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(n)]


def test_jsonl_json_and_parquet_give_the_same_problems(tmp_path):
    import pyarrow
    import pyarrow.parquet

    data = rows(30)
    (tmp_path / "a.json").write_text(json.dumps(data))
    write(tmp_path / "a.jsonl", data)
    write(tmp_path / "b.json", data)  # JSON lines named .json
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "a.parquet")
    tasks = [load_task(str(tmp_path / name)) for name in ("a.json", "a.jsonl", "b.json", "a.parquet")]
    streams = [[task.train(i) for i in range(40)] + task.heldout(99) for task in tasks]
    assert streams[0] == streams[1] == streams[2] == streams[3]
    assert isinstance(tasks[0], Task)
    assert tasks[0].verifier == "numeric"
    assert streams[0][0].extra.keys() == {"level"}


def test_each_epoch_shows_every_training_row_once_in_a_fresh_seeded_order(tmp_path):
    path = str(write(tmp_path / "a.jsonl", rows(25)))
    task, again, other = load_task(path, seed=1), load_task(path, seed=1), load_task(path, seed=2)
    n = task.size
    epochs = [[task.train(e * n + i).id for i in range(n)] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(epochs[0])] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [again.train(i).id for i in (2 * n, 3, n)] == [
        epochs[2][0],
        epochs[0][3],
        epochs[1][0],
    ]  # any order of asking
    assert [other.train(i).id for i in range(n)] != epochs[0]
    assert other.heldout(99) == task.heldout(99)  # the split does not depend on the seed
    assert n == 20
    assert len(task.heldout(99)) == 5
    assert len(task.heldout(2)) == 2


def test_rows_with_one_prompt_are_two_problems_on_one_side_of_the_split(tmp_path):
    data = [{"prompt": f"p{i // 3}", "answer": f"a{i}"} for i in range(60)]
    task = load_task(str(write(tmp_path / "a.jsonl", data)))
    train = [task.train(i) for i in range(task.size)]
    held = task.heldout(99)
    assert sorted(p.id for p in train + held) == list(range(60))
    assert not {p.prompt for p in train} & {p.prompt for p in held}
    assert held
    assert all(p.answer == f"a{p.id}" for p in train + held)


def test_eval_file_is_the_held_out_set_and_its_prompts_leave_the_training_data(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(10))
    other = write(tmp_path / "eval.jsonl", [{"prompt": "3+1=", "answer": 4}, {"prompt": "99+1=", "answer": 100}])
    task = load_task(str(path), eval_file=other)
    assert [p.prompt for p in task.heldout(10)] == ["3+1=", "99+1="]
    assert "3+1=" not in {task.train(i).prompt for i in range(20)}
    assert task.dropped == 1
    assert not {p.id for p in task.heldout(10)} & {task.train(i).id for i in range(20)}
    with pytest.raises(InputError, match="nothing is left to train on"):
        load_task(str(write(tmp_path / "b.jsonl", rows(100)[99:] + rows(4)[3:])), eval_file=other)


def test_nothing_held_out_is_said_when_it_is_asked_for(tmp_path):
    task = load_task(str(write(tmp_path / "a.jsonl", rows(1))))
    assert task.train(7) == Problem(id=0, prompt="0+1=", answer=1, extra={"level": 0})
    with pytest.raises(InputError, match="name an eval file"):
        task.heldout(5)
    with pytest.raises(InputError, match="no row is held out"):
        load_task(str(write(tmp_path / "b.jsonl", rows(50))), heldout=0).heldout(5)


def test_gsm8k_layout_works_as_it_is(tmp_path):
    data = [{"question": f"q{i}", "answer": f"Some steps.\n#### {i},000"} for i in range(10)]
    task = load_task(str(write(tmp_path / "gsm.jsonl", data)))
    assert task.verifier == "gsm8k"
    assert task.train(0).prompt.startswith("q")
    data[6]["answer"] = "no marker"
    with pytest.raises(InputError, match="line 7 has no answer after '####'"):
        _ = load_task(str(write(tmp_path / "gsm.jsonl", data))).verifier


@pytest.mark.parametrize(
    ("answers", "verifier"),
    [
        ([1, 2.5, "3"], "numeric"),
        (["1", "x"], "exact"),
        ([r"$\sqrt{2}$", "4"], "math_verify"),
        ([[1, "one"], [2]], "exact"),
        ([[1], [2, 3]], "numeric"),
        ([["$1$"], ["2"]], "numeric"),
        ([[r"\frac12", "x"], ["2"]], "math_verify"),
        (["01", "02"], "exact"),
        ([True, False], "exact"),
        (["12:00", "10:30"], "exact"),
    ],
)
def test_a_file_brings_the_verifier_its_answers_ask_for(tmp_path, answers, verifier):
    data = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    assert load_task(str(write(tmp_path / "a.jsonl", data))).verifier == verifier


def test_chat_prompts_other_columns_unicode_and_byte_order_marks(tmp_path):
    chat = [{"role": "user", "content": "Zähle\u2028weiter 🙂"}]
    line = json.dumps({"messages": chat, "target": "dreißig", "prompt": "other"}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + line + "\r\n\r\n" + line + "\n", encoding="utf-8")
    task = load_task(str(path), prompt_column="messages", answer_column="target", heldout=0)
    assert task.train(0).prompt == chat
    assert task.train(0).answer == "dreißig"
    assert task.size == 2


GOOD = '{"prompt": "p", "answer": "a"}\n'
DEEP = "[" * 100_000
BAD = {
    "blank row": ('{"prompt": "p", "answer": "a"}\n{"prompt": "p", "answer": ""}\n', ["line 2", "answer", "empty"]),
    "null answer": (GOOD + '{"prompt": "p", "answer": null}\n', ["line 2", "'answer'"]),
    "NaN answer": (GOOD + '{"prompt": "p", "answer": NaN}\n', ["line 2", "'answer'"]),
    "no answer": (GOOD + "\n" + '{"prompt": "p"}\n', ["line 3", "'answer'", "no answer"]),
    "no prompt": (GOOD + '{"answer": "a"}\n', ["line 2", "'prompt'"]),
    "number as prompt": (GOOD + '{"prompt": 3, "answer": "a"}\n', ["line 2", "'prompt'", "int"]),
    "bad message": ('{"prompt": [{"role": "user"}], "answer": "a"}\n', ["line 1", "message 1"]),
    "invalid JSON": (GOOD + '{"prompt": "p", \n', ["line 2", "invalid JSON"]),
    "not an object": (GOOD + "[1]\n", ["line 2", "a list"]),
    "unknown column": ('{"question": "p", "solution": "a"}\n', ["'prompt'", "question, solution"]),
    "empty": ("", ["empty"]),
    "blank lines": ("\n\n", ["empty"]),
    "nested": ('{"prompt": "p", "answer": ' + DEEP + "\n", ["line 1"]),
    "long number": ('{"prompt": "p", "answer": ' + "9" * 5000 + "}\n", ["line 1", "digits"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_name_file_place_column_and_mend(tmp_path, case):
    text, words = BAD[case]
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_task(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert "data.jsonl" in message
    assert len(message) < 500
    for word in words:
        assert word in message
    assert caught.value.exit_status == 2


def test_bad_files(tmp_path):
    write(tmp_path / "a.jsonl", rows(3))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "latin.jsonl").write_bytes(GOOD.encode() + b'{"prompt": "\xe9"}\n')
    (tmp_path / "fake.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "list.json").write_text('[{"prompt": "p", "answer": 1}, 3]')
    (tmp_path / "broken.json").write_text('[{"prompt": "p",\n "answer": }]')
    for spec, words in {
        str(tmp_path / "none.jsonl"): ["no such file"],
        str(tmp_path): ["different formats", "*.json"],
        str(tmp_path / "a.txt"): ["must end in .jsonl"],
        str(tmp_path / "latin.jsonl"): ["line 2", "UTF-8"],
        str(tmp_path / "fake.parquet"): ["not a readable parquet"],
        str(tmp_path / "empty.parquet"): ["empty"],
        str(tmp_path / "list.json"): ["row 2", "int"],
        str(tmp_path / "broken.json"): ["line 2", "invalid JSON"],
        "": ["needed"],
    }.items():
        with pytest.raises(InputError) as caught:
            load_task(spec)
        for word in words:
            assert word in str(caught.value), str(caught.value)
    with pytest.raises(UnknownNameError, match="the columns are answer, level, prompt"):
        load_task(str(tmp_path / "a.jsonl"), answer_column="gold")


def test_unknown_tasks_list_close_matches():
    with pytest.raises(UnknownNameError, match="did you mean addition"):
        load_task("adition")
    with pytest.raises(InputError, match="data file"):
        load_task("addition", prompt_column="text")
    with pytest.raises(InputError, match="eval_file"):
        load_task("addition", eval_file="x.jsonl")
    assert load_task("addition", system="Add.").system == "Add."
    assert load_task("addition").system is None


def test_reasoning_gym_problems_are_a_function_of_the_index_and_held_out_ones_never_trained_on():
    pytest.importorskip("reasoning_gym")
    first, second = load_task("reasoning_gym:leg_counting", seed=3), load_task("reasoning_gym:leg_counting", seed=3)
    assert isinstance(first, Task)
    assert first.verifier == "reasoning_gym"
    assert "answer" in first.system
    assert [first.train(i) for i in (5, 0, 5)] == [second.train(i) for i in (5, 0, 5)]
    held = {p.prompt for p in first.heldout(10)}
    assert len(held) == 10
    assert [p.prompt for p in load_task("reasoning_gym:leg_counting", seed=9).heldout(10)] == [
        p.prompt for p in first.heldout(10)
    ]
    assert not held & {first.train(i).prompt for i in range(100)}
    with pytest.raises(UnknownNameError, match="did you mean leg_counting"):
        load_task("reasoning_gym:leg_countin")
    with pytest.raises(UnknownNameError, match="dataset"):
        load_task("reasoning_gym:composite")  # a mixture without problems of its own


def test_reasoning_gym_problems_do_not_depend_on_the_hash_seed_of_the_process():
    pytest.importorskip("reasoning_gym")
    code = "from kenpo.experience.tasks import load_task; print(load_task('reasoning_gym:ransom_note').train(1).prompt)"
    made = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1


def test_reasoning_gym_without_its_package_says_what_to_install(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install .*'\.\[tasks\]'"):
        load_task("reasoning_gym:gcd")
