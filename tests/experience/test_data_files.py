"""Data files as people have them: formats, compressions, shards and layouts; the others are refused in a line."""

import bz2
import gzip
import json
import lzma

import pytest

from kenpo.errors import InputError
from kenpo.experience.demonstrations import FileTexts
from kenpo.experience.files import FileTask
from kenpo.experience.shards import name_of, read_rows
from kenpo.experience.tasks import load_task

USER = [{"role": "user", "content": "2+2?"}]
TURNS = [*USER, {"role": "assistant", "content": "4"}]
SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def lines(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(rows):
    import io

    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


PLAIN = {"prompt": "2+2?", "answer": "4"}
VERL = {"data_source": "d", "prompt": USER, "ability": "math", "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0}}  # fmt: skip
MATH = {"problem": "2+2?", "level": "1", "type": "Algebra", "solution": r"So $\boxed{\frac{8}{2}}$, or $\boxed{{4}}$."}

# name of the file: (content, options, prompt and answer of the first row)
GOOD = {
    "plain.jsonl": (lines(PLAIN, PLAIN), {}, "2+2?", "4"),
    "bom.jsonl": (b"\xef\xbb\xbf" + lines(PLAIN), {}, "2+2?", "4"),
    "crlf.jsonl": (lines(PLAIN, PLAIN).replace(b"\n", b"\r\n"), {}, "2+2?", "4"),
    "blank-lines.jsonl": (b"\n" + lines(PLAIN) + b"\n\n", {}, "2+2?", "4"),
    "list.json": (json.dumps([PLAIN, PLAIN]).encode(), {}, "2+2?", "4"),
    "packed.jsonl.gz": (gzip.compress(lines(PLAIN)), {}, "2+2?", "4"),
    "packed.json.bz2": (bz2.compress(json.dumps([PLAIN]).encode()), {}, "2+2?", "4"),
    "packed.csv.xz": (lzma.compress(b"prompt,answer\n2+2?,4\n"), {}, "2+2?", "4"),
    "plain.csv": (b"prompt,answer\n2+2?,4\n3+3?,6\n", {}, "2+2?", "4"),
    "bom-crlf.csv": (b"\xef\xbb\xbfprompt,answer\r\n2+2?,4\r\n", {}, "2+2?", "4"),
    "quoted.csv": (b'id,prompt,answer\n1,"two, and\n""two""?",4\n', {}, 'two, and\n"two"?', "4"),
    "empty-cell.csv": (b"prompt,answer,note\n2+2?,4,\n", {}, "2+2?", "4"),
    "tabs.tsv": (b"prompt\tanswer\n2+2?\t4\n", {}, "2+2?", "4"),
    "messages.csv": (('messages,answer\n"' + json.dumps(USER).replace('"', '""') + '",4\n').encode(), {}, USER, "4"),
    "plain.parquet": (parquet([PLAIN]), {}, "2+2?", "4"),
    "verl.parquet": (parquet([VERL]), {}, USER, "4"),
    "dapo.jsonl": (lines(VERL), {}, USER, "4"),
    "nested.jsonl": (
        lines({"q": "2+2?", "a": {"b": {"c": 4}}}), {"prompt_column": "q", "answer_column": "a.b.c"}, "2+2?", 4),
    "gsm8k.jsonl": (lines({"question": "2+2?", "answer": "two\n#### 4"}), {}, "2+2?", "two\n#### 4"),
    "math.jsonl": (lines(MATH), {}, "2+2?", "{4}"),
    "math500.jsonl": (lines({**MATH, "answer": "4", "unique_id": "x"}), {}, "2+2?", "4"),
    "alpaca.json": (
        json.dumps([{"instruction": "Add.", "input": "2+2", "output": "4"}]).encode(), {}, "Add.\n\n2+2", "4"),
    "alpaca-no-input.json": (
        json.dumps([{"instruction": "2+2?", "input": "", "output": "4"}]).encode(), {}, "2+2?", "4"),
    "sharegpt.json": (
        json.dumps([{"id": "1", "conversations": SHARED}]).encode(), {"answer_column": "last-turn"}, USER, "4"),
    "sharegpt-system.jsonl": (
        lines({"system": "Add.", "conversations": SHARED}), {"answer_column": "last-turn"},
        [{"role": "system", "content": "Add."}, *USER], "4"),
    "conversation.jsonl": (lines({"messages": TURNS}), {"answer_column": "last-turn"}, USER, "4"),
    "messages-and-answer.jsonl": (lines({"messages": USER, "answer": 4}), {}, USER, 4),
    "nulls-elsewhere.jsonl": (lines({**PLAIN, "note": None}, PLAIN), {}, "2+2?", "4"),
    "several-answers.jsonl": (lines({"prompt": "2+2?", "answer": ["4", "four"]}), {}, "2+2?", ["4", "four"]),
}  # fmt: skip

# name of the file: (content, options, what the one line says)
BAD = {
    "latin1.csv": (b"prompt,answer\n\xe9,4\n", {}, ["line 2", "UTF-8"]),
    "semicolons.csv": (b"prompt;answer\n2+2?;4\n", {}, ["commas"]),
    "ragged.csv": (b"prompt,answer\n2+2?,4,5\n", {}, ["line 2", "3 cells under 2 columns"]),
    "open-quote.csv": (b'prompt,answer\n"2+2?,4\n', {}, ["not readable as a table"]),
    "unnamed.csv": (b"prompt,answer,\n2+2?,4,x\n", {}, ["column 3 has no name"]),
    "twice.csv": (b"prompt,answer,answer\n2+2?,4,5\n", {}, ["two columns are named 'answer'"]),
    "header-only.csv": (b"prompt,answer\n", {}, ["empty"]),
    "python-repr.csv": (b"messages,answer\n\"[{'role': 'user', 'content': 'x'}]\",4\n", {}, ["written as Python"]),
    "empty-answer.csv": (b"prompt,answer\n2+2?,4\n3+3?,\n", {}, ["line 3", "'answer'"]),
    "broken.jsonl.gz": (gzip.compress(lines(PLAIN))[:-6], {}, ["can't be unpacked"]),
    "no-gzip.jsonl.gz": (lines(PLAIN), {}, ["can't be unpacked"]),
    "unknown.txt.gz": (gzip.compress(lines(PLAIN)), {}, ["must end in .jsonl"]),
    "null-truth.jsonl": (
        lines(VERL, {**VERL, "reward_model": {"style": "rule", "ground_truth": None}}), {},
        ["line 2", "reward_model.ground_truth"]),
    "conversation-in-the-prompt.jsonl": (
        lines({"prompt": TURNS, "answer": "4"}), {}, ["line 1", "--answer-column last-turn"]),
    "conversation-without-answer.jsonl": (lines({"messages": TURNS}), {}, ["--answer-column last-turn"]),
    "ends-with-the-user.jsonl": (
        lines({"messages": TURNS}, {"messages": USER}), {"answer_column": "last-turn"}, ["line 2", "assistant's turn"]),
    "tool-turn.json": (
        json.dumps([{"conversations": [*SHARED, {"from": "function_call", "value": "f()"}]}]).encode(),
        {"answer_column": "last-turn"}, ["row 1", "turn 3", "function_call"]),
    "no-box.jsonl": (lines(MATH, {**MATH, "solution": "So 4."}), {}, ["line 2", "boxed"]),
    "content-parts.jsonl": (
        lines({"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "answer": "4"}), {},
        ["line 1", "message 1"]),
    "wrong-path.jsonl": (lines({"prompt": "x", "answer": "4", "a": {"b": 1}}), {"answer_column": "a.c"},
                         ["line 1", "'a.c'"]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_files_as_people_have_them_load(tmp_path, name):
    content, options, prompt, answer = GOOD[name]
    (tmp_path / name).write_bytes(content)
    task = load_task(str(tmp_path / name), heldout=0, **options)
    first = task.problem(0)
    assert (first.prompt, first.answer) == (prompt, answer)
    assert task.name == name.split(".")[0]
    assert first.place.startswith(f"{tmp_path / name}: ")


@pytest.mark.parametrize("name", BAD)
def test_others_are_refused_in_one_line_that_says_what_to_write(tmp_path, name):
    content, options, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_task(str(tmp_path / name), heldout=0, **options)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_there_are_enough_of_them():
    assert len(GOOD) + len(BAD) >= 30


def test_other_columns_stay_at_hand_for_verifiers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(VERL))
    extra = load_task(str(tmp_path / "a.jsonl"), heldout=0).problem(0).extra
    assert extra["data_source"] == "d"
    assert extra["extra_info"] == {"index": 0}
    (tmp_path / "b.jsonl").write_bytes(lines(MATH))
    assert load_task(str(tmp_path / "b.jsonl"), heldout=0).problem(0).extra.keys() == {"level", "type"}


RESPONSES = {
    "plain.jsonl": lines({"prompt": "2+2?", "response": "4"}),
    "completion.jsonl": lines({"prompt": "2+2?", "completion": "4"}),
    "completion-message.jsonl": lines({"prompt": USER, "completion": [{"role": "assistant", "content": "4"}]}),
    "messages.jsonl": lines({"messages": TURNS}),
    "sharegpt.jsonl": lines({"conversations": SHARED}),
    "alpaca.json": json.dumps([{"instruction": "2+2?", "input": "", "output": "4"}]).encode(),
    "gsm8k.csv": b"question,answer\n2+2?,4\n",
    "math.jsonl": lines({"problem": "2+2?", "solution": "4"}),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_demonstrations_come_in_layouts_too(tmp_path, name):
    (tmp_path / name).write_bytes(RESPONSES[name])
    (text,) = FileTexts(str(tmp_path / name), "prompt", "response", 0).rows
    assert text.prompt in ("2+2?", USER)
    assert text.response == "4"


def test_a_folder_of_shards_a_pattern_and_several_files_are_one_data_set(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for n in range(3):
        (folder / f"train-{n:05d}-of-00003.parquet").write_bytes(parquet([{"prompt": f"{n}?", "answer": str(n)}]))
    (folder / "README.md").write_text("what this is")
    files = sorted(map(str, folder.glob("*.parquet")))
    for spec in (str(folder), f"{folder}/train-*.parquet", files):
        task = load_task(spec, heldout=0)
        assert [task.problem(i).prompt for i in task.ids] == ["0?", "1?", "2?"]
        assert task.problem(2).place == f"{files[2]}: row 1"
    assert name_of(str(folder)) == "shards"
    (folder / "test-00000-of-00001.parquet").write_bytes(parquet([PLAIN]))
    with pytest.raises(InputError, match=r"several splits \(test, train\)"):
        load_task(str(folder))
    with pytest.raises(InputError, match="no file matches"):
        load_task(f"{folder}/dev-*.parquet")
    with pytest.raises(InputError, match="given twice"):
        load_task([files[0], files[0]])
    with pytest.raises(InputError, match="several tasks at once are data files"):
        load_task(["addition", files[0]])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="without data files"):
        load_task(str(tmp_path / "empty"))


def test_data_sets_of_the_hub_come_through_datasets(tmp_path):
    """A local folder in the place of a hub's name, which `datasets` takes alike; the download itself is not tested."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(PLAIN, {**PLAIN, "answer": "5"}))
    (folder / "test.jsonl").write_bytes(lines({**PLAIN, "answer": "6"}))
    assert [row.values["answer"] for row in read_rows(f"hub:{folder}")] == ["4", "5"]
    (row,) = read_rows(f"hub:{folder}:test")
    assert row.values == {**PLAIN, "answer": "6"}
    assert row.place == f"hub:{folder}:test: row 1"
    assert name_of(f"hub:{folder}:test") == "mine"
    with pytest.raises(InputError, match="can't load it"):
        read_rows(f"hub:{folder}:validation")
    with pytest.raises(InputError, match="write hub:NAME"):
        read_rows("hub:a:b:c:d")
    datasets.Dataset.from_list([PLAIN]).save_to_disk(str(tmp_path / "saved"))
    assert [row.values for row in read_rows(str(tmp_path / "saved"))] == [PLAIN]
    datasets.DatasetDict(train=datasets.Dataset.from_list([PLAIN])).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(InputError, match="holds the splits train"):
        read_rows(str(tmp_path / "both"))


def test_several_eval_files_are_sets_with_names(tmp_path):
    for name, start in (("train", 0), ("a", 3), ("b", 100)):
        rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + 10)]
        (tmp_path / f"{name}.jsonl").write_bytes(lines(*rows))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    task = FileTask(tmp_path / "train.jsonl", eval_file=files, heldout=4)
    assert [(p.set, p.prompt) for p in task.heldout(2)] == [("a", "3?"), ("a", "4?"), ("b", "100?"), ("b", "101?")]
    assert len({p.id for p in task.heldout(99)}) == 20
    assert task.size == 3
    assert len(task.notes) == 3
    assert "a: the first 4 of 10 rows are evaluated" in task.notes[0]
    assert "7 of 10 rows repeat a prompt" in task.notes[2]
