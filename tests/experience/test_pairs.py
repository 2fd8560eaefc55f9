"""Pairs from files: plain texts, conversations, implicit prompts, ties and empty sides; the bundled ones."""

from __future__ import annotations

import json

import pytest

from kenpo.errors import InputError
from kenpo.experience.addition import is_held_out
from kenpo.experience.pairs import Columns, bundled_pairs, file_pairs, read_pair, read_pairs
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier

USER, BAD, GOOD = ({"role": r, "content": c} for r, c in (("user", "1+1?"), ("assistant", "3"), ("assistant", "2")))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_plain_texts_and_columns_of_other_names():
    row = {"q": "1+1=", "a": "2", "b": "3", "margin": 2}
    assert read_pair(row, "row 1", Columns("q", "a", "b")) == ("1+1=", "2", "3", "row 1", 2.0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "1+1?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_conversations_however_they_are_written(row):
    assert read_pair(row, "row 1")[:3] == ([USER], "2", "3")


def test_an_implicit_prompt_ends_between_two_words():
    row = {"chosen": "Q: who? A: the tall man", "rejected": "Q: who? A: the taller man"}
    assert read_pair(row, "row 1")[:3] == ("Q: who? A: the", " tall man", " taller man")


def test_an_implicit_prompt_does_not_swallow_equal_responses():
    assert read_pair({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "row 1")[:3] == ([USER], "2", "2")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "write both the same way"),
        ({"chosen": "b", "rejected": "c"}, "no beginning in common"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "column 'chosen' must hold"),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]}, "one message, the assistant's"),
        ({"prompt": [USER, GOOD], "chosen": "b", "rejected": "c"}, "ends with the assistant's message"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"}, "'margin' holds \"much\", no number"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(row, what):
    with pytest.raises(InputError, match=what) as refused:
        read_pair(row, "data.jsonl: line 7")
    assert "data.jsonl: line 7" in str(refused.value)


ROWS = [
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "chosen": "same", "rejected": "same"},
    {"prompt": "a", "chosen": "b", "rejected": "  "},
    {"prompt": "a", "chosen": None, "rejected": "c"},
]


def test_ties_and_empty_sides_are_left_out_and_counted(tmp_path):
    found, skipped = read_pairs(write(tmp_path / "p.jsonl", ROWS), Columns())
    assert [p.rejected for p in found] == ["c"]
    assert skipped == 3
    assert file_pairs(str(tmp_path / "p.jsonl"), Columns(), 0).skipped == 3


@pytest.mark.parametrize(("row", "what"), [(1, "equal"), (2, "empty"), (3, "empty")])
def test_or_refused(row, what, tmp_path):
    with pytest.raises(InputError, match=f"line 2.*{what}"):
        read_pairs(write(tmp_path / "p.jsonl", [ROWS[0], ROWS[row]]), Columns(), "refuse")


def test_a_file_without_a_usable_pair_is_refused(tmp_path):
    with pytest.raises(InputError, match="none of the 3 pairs"):
        read_pairs(write(tmp_path / "p.jsonl", ROWS[1:]), Columns())


def test_rows_of_a_prompt_stay_on_one_side_and_every_epoch_shows_each_row_once(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": f"{i // 2} ", "chosen": "x", "rejected": str(i)} for i in range(20)])
    stream = file_pairs(path, Columns(), 0, heldout=4)
    assert len(stream.heldout) == 4
    assert not {p.prompt for p in stream.heldout} & {p.prompt for p in stream.rows}
    first, second = ([stream.place(i) for i in part] for part in (range(16), range(16, 32)))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    assert [stream.place(i) for i in range(16)] == first


def test_parquet_is_read_like_json_lines(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert read_pairs(str(tmp_path / "p.parquet"), Columns())[0][0][:3] == ([USER], "2", "3")


def test_the_bundled_pairs_are_what_the_verifier_says_but_for_a_share():
    with load_verifier("numeric") as verifier:

        def right(pairs):
            ask = [Sample(completion=p.chosen, answer=sum(map(int, p.prompt[:-1].split("+")))) for p in pairs]
            return [v.reward == 1 for v in verifier.score(ask)]

        told, flipped = (bundled_pairs(3, share, 256) for share in (0.0, 0.1))
        assert all(right(told.rows))
        assert all(right(told.heldout))
        assert all(right(flipped.heldout))
        share = 1 - sum(right(flipped.rows)) / len(flipped.rows)
    assert 0.07 < share < 0.13
    assert len(told.rows) == 2048
    for pairs, held in ((told.rows, False), (told.heldout, True)):
        assert all(is_held_out(*map(int, p.prompt[:-1].split("+"))) == held for p in pairs)
    other = bundled_pairs(4, 0.1, 0).rows
    assert [p.chosen for p in other] != [p.chosen for p in flipped.rows]
