"""Kinds of answers that were misread, with neighbours of each; golds first in the pairs."""

from __future__ import annotations

import json
import sys
import time

import pytest

from kenpo.errors import InputError
from kenpo.experience.answers import explicit_answer, stated_formula
from kenpo.experience.exact import Exact, Numeric, found_number
from kenpo.experience.tasks import load_task
from kenpo.experience.verifiers import Sample, load_verifier

REMARKS = [
    "I checked that the answer is right.",
    "The answer is final.",
    "This answer is verified.",
    "So the answer is indeed correct.",
    "Hence the answer is positive.",
    "The answer is consistent with step 3.",
    "The answer is a whole number, as it must be.",
    "The answer is also the one we expected.",
    "Of course the answer is less than 100.",
    "The answer is not 41.",
    "What if the answer is 40?",
]
FORMS = [r"\boxed{42}", "<answer>42</answer>", "#### 42", "Answer: 42", "The answer is **42**."]


@pytest.mark.parametrize("remark", REMARKS)
@pytest.mark.parametrize("form", FORMS)
def test_a_remark_voids_no_answer(form, remark):
    text = f"Step 1: 6 * 7.\n{form}\n\n{remark}"
    assert explicit_answer(text) == "42"
    assert found_number(text).value == 42


NUMERIC = [
    # one number in a wrapper
    ("42", r"\boxed{\textbf{42}}", 1), ("42", r"\boxed{\mathit{42}}", 1), ("42", r"\boxed{\bigl(42\bigr)}", 1),
    ("42", r"\boxed{\quad 42 \quad}", 1), ("42", r"\boxed{\ensuremath{42}}", 1), ("42", "Answer: ((42))", 1),
    ("42", r"\boxed{\color{red}{42}}", 1), ("42", "Answer: ~42", 1), ("42", "Answer: `42`", 1),
    ("42", 'Answer: "42"', 1),
    ("-7", r"\boxed{\left[-7\right]}", 1), ("0.5", r"\boxed{\mathrm{0.5}}", 1), ("42", r"\framebox{42}", 1),
    # the number beside another
    ("42", "The answer is 42, since 6x = 252.", 1), ("252", "The answer is 42, since 6x = 252.", 0),
    ("42", "The answer is 42 if y = 3.", 1), ("42", "The answer is 42, assuming n = 10.", 1),
    ("42", "The answer is 42 rather than 41.", 1), ("42", "The answer is 42 instead of 7.", 1),
    ("42", "The answer is x = 42, with y = 5.", 1), ("5", "The answer is x = 42, with y = 5.", 0),
    ("42", r"\boxed{42 \text{ where } x = 7}", 1), ("42", "The answer is 42 = 6 * 7.", 1),
    ("2", r"\boxed{x + 2}", 0), ("3", r"\boxed{n - 3}", 0), ("42", "Answer: 42 and 43", 0), ("6", "Answer: 6:30", 0),
    ("40", "Answer: between 40 and 42", 0), ("3", "Answer: 3 to 5", 0), ("3", r"Answer: 3 \pm 1", 0),
    ("42", "The answer is 42 and x = 7.", 1), ("7", "The answer is 42, x = 7.", 0), ("42", r"\boxed{\Large 42}", 1),
    # forms that are not filled in
    ("25", "The answer is 25.\n\nThe answer is 12 + 13 =", 1), ("27", "The answer is \\boxed{}, which is 27 books.", 1),
    ("59", "He has 59 apples.\n####\n####\n####", 1), ("178", "50 + 12 = 178 with '####'", 1),
    # units, percent, currency
    ("5 m", "Answer: 5 metres", 1), ("5 m", "Answer: 5 m/s", 0), ("5 m^2", "Answer: 5 square meters", 1),
    ("5 m", "Answer: 5 square meters", 0), ("60 mph", "Answer: 60 miles per hour", 1),
    ("5", "Answer: 5 apples left", 1),
    ("12 apples", "Answer: 12 apples in total", 1), ("-5", r"Answer: -\$5", 1), ("$5", "Answer: 5 dollars", 1),
    ("$5", "Answer: 5 euros", 0), ("35 percent", r"\boxed{35\%}", 1), ("0.35", "Answer: 35 per cent", 1),
    ("35%", "Answer: 0.35", 1), ("35%", "Answer: 350", 0), ("90", r"\boxed{90^{\circ}}", 1),
    # digits with a leading zero, several answers, endless decimals, solutions as golds
    ("0042", "Answer: 42", 0), ("0042", "Answer: 0042", 1), ("-07", r"\boxed{-7}", 0), ("0", "Answer: 0", 1),
    ("0.5", "Answer: .5", 1), (8, "Answer: 08", 1), ([1, "2"], "Answer: 2", 1), ([1, "2"], "Answer: 3", 0),
    ("1/6", "Answer: 0.166667", 1), ("1/6", "Answer: 0.16667", 0), ("2/3", r"\boxed{0.\overline{6}}", 1),
    ("1.1", "Answer: 1.100001", 1), ("1.1", "Answer: 1.10001", 0), ("1e-9", "Answer: 2e-9", 0),
    ("1e-9", "Answer: 0.0", 0),
    (r"It is \boxed{42}.", "Answer: 42", 1), ("So it goes.\n#### 42", r"\boxed{42}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "completion", "reward"), NUMERIC)
def test_numbers(gold, completion, reward):
    verdict = Numeric().judge(Sample(completion=completion, answer=gold))
    assert (verdict.status, verdict.reward) == ("ok", reward)


EXACT = [
    ("B", r"\boxed{\textbf{(B)}\ 12}", 1), ("12", r"\boxed{\textbf{(B)}\ 12}", 1),
    ("C", r"\boxed{\textbf{(B)}\ 12}", 0),
    ("B", "[B]", 1), ("B", "Option B", 1), ("B", "**(B)**", 1), ("B", "B: Paris", 1), ("B", r"\boxed{\textbf{(B)}}", 1),
    ("(B)", "B", 1), ("B) Paris", "B", 1), ("B) Paris", "Paris", 1), ("B) Paris", "Lima", 0),
    ("B) Paris", "B) Lima", 0), ("B", "(C)", 0),
    ("Paris", "(B) Paris", 1), ("Paris", "(B) Lima", 0), ("A", "A and B", 0), ("A", "A cat", 0), ("A", "(A), (B)", 0),
    ("B", "The answer is B because it is large.", 1), ("ii", "(ii)", 1), ("b", "B", 0),
    ("Paris", "Answer: Paris, because it is the capital.", 1), ("Paris", "Paris, Texas", 0),
    ("Paris, Texas", "Paris", 0),
    ("Paris", "Answer:\n\\[\n\\text{Paris}\n\\]", 1), ("x^2", "Answer:\n$$\nx^2\n$$", 1),
    ("x", "Answer:\n```\nx\n```", 1),
    ("The Beatles", "The answer is The Beatles.", 1), ("3.5", "The answer is 3.5.", 1),
    ("No", "Answer: No. It is odd.", 1),
    (True, "TRUE", 1), (True, "yes", 1), (True, "1", 0), (False, "The answer is no.", 1), (False, "yes", 0),
    ([True], "Yes", 1), (["4", "four"], "Four", 0), (["4", "four"], "four.", 1), ([4], "4", 1), (["a b"], "a  b", 1),
    ("01", "1", 0), ("01", "01", 1), ("12:00", "12:00.", 1), ("Paris", "<think>Rome</think>Paris", 1),
    ("Paris", "<think>Paris</think>Rome", 0), ("Paris", "<answer>Paris", 1), (r"\boxed{Paris}", "Paris", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "completion", "reward"), EXACT)
def test_texts(gold, completion, reward):
    verdict = Exact().judge(Sample(completion=completion, answer=gold))
    assert (verdict.status, verdict.reward) == ("ok", reward)


@pytest.mark.parametrize("gold", [None, "", [], ["a", ""], [None]])
def test_a_missing_answer_abstains(gold):
    assert Exact().judge(Sample(completion="a", answer=gold)).status == "abstain"
    assert Numeric().judge(Sample(completion="1", answer=gold)).status == "abstain"


def test_the_last_formula_is_read_where_nothing_is_stated():
    assert stated_formula(r"We have $x=1$ and then \[ y = 2 \] as shown, which ends the proof at last.") == "y = 2"
    assert stated_formula("We get $x=42$. The answer is correct.") == "x=42"
    assert stated_formula("We only talk.\nAnd talk.") is None


# ------------------------------------------------------------------------------------------------ the data


def write(path, answers, column="answer"):
    rows = [{"prompt": f"p{i}", column: answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("verifier", "answers", "place"),
    [
        ("numeric", ["1", "2", "see figure", "4", "x"], "line 3"),
        ("numeric", ["1", True, "3"], "line 2"),
        ("gsm8k", ["#### 1", "#### one", "#### 3"], "line 2"),
        ("numeric", [["1", "one"], "2"], "line 1"),
        ("math_verify", ["1", r"\frac{1}{2}", "see figure"], "line 3"),
        ("math_verify", ["1", r"\frac{1}{}", "2"], "line 2"),
        ("exact", ["a", {"style": "rule", "ground_truth": "b"}], "line 2"),
        ("math_verify", ["1", [{"a": 1}]], "line 2"),
    ],
)
def test_a_gold_that_cannot_be_read_is_refused_with_its_row(tmp_path, verifier, answers, place):
    if verifier == "math_verify":
        pytest.importorskip("math_verify")
    task = load_task(write(tmp_path / "a.jsonl", answers))
    with pytest.raises(InputError, match=rf"a\.jsonl: {place}"):
        load_verifier(verifier, task=task, workers=1)


def test_the_rows_of_an_eval_file_are_checked_too(tmp_path):
    train, held = write(tmp_path / "a.jsonl", ["1", "2"]), tmp_path / "b.jsonl"
    held.write_text('{"prompt": "q", "answer": "see figure"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"b\.jsonl: line 1"):
        load_verifier("numeric", task=load_task(train, eval_file=str(held)))


def test_readable_golds_of_every_kind_are_taken(tmp_path):
    pytest.importorskip("math_verify")
    answers = ["1", r"\sqrt[3]2", "12:00", "1, 2, or 3", "Yes", "(B)", True, ["5", r"\pi"], "01", "35 percent", "1:2:3"]
    task = load_task(write(tmp_path / "a.jsonl", answers))
    with load_verifier("math_verify", task=task, workers=1) as verifier:
        assert verifier.unreadable([problem.answer for problem in task.problems]) == {}


def test_an_object_is_named_by_its_path(tmp_path):
    answers = [{"style": "rule", "ground_truth": str(i)} for i in range(5)]
    path = write(tmp_path / "a.jsonl", answers, column="reward_model")
    with pytest.raises(InputError, match=r"keys: style, ground_truth.*--answer-column reward_model.ground_truth"):
        _ = load_task(path, answer_column="reward_model").verifier
    task = load_task(path, answer_column="reward_model.ground_truth")
    assert task.verifier == "numeric"
    assert {task.train(i).answer for i in range(5)} <= {str(i) for i in range(5)}
    assert task.train(0).extra["reward_model"]["style"] == "rule"
    with pytest.raises(InputError, match=r"no column 'reward_model\.truth'"):
        load_task(path, answer_column="reward_model.truth")


# ------------------------------------------------------------------------------------------------ time

HOSTILE = [
    "the answer is ", "answer to the ", "Answer:\n", r"\boxed{", r"\boxed{1}", "<answer>", "</think>", "#### a\n", "((",
    "{", "[[1,", "$", "$$\n", "```\n", r"\text{", r"\left(", "1 ", "1.", "0.1\\overline{", "9", " ", ", where ", " (a",
    "answer is not ", "\\[", "?", "B) ", "12:", "and ", "\\", "*", "_", "~", "<b>", "answer, ", "1,111",
    "\u0130answer is ",
]  # fmt: skip


def seconds(verify, unit, size):
    text = unit * (size // len(unit))
    start = time.process_time()
    verify(text)
    return time.process_time() - start


@pytest.mark.parametrize("unit", HOSTILE, ids=repr)
def test_four_times_the_text_takes_about_four_times_as_long(unit):
    """A quadratic reading would take sixteen times as long."""
    exact, numeric = Exact(), Numeric()
    verifiers = {
        "exact": lambda text: exact.judge(Sample(completion=text, answer="Paris")),
        "numeric": lambda text: numeric.judge(Sample(completion=text, answer="12345678")),
        "math_verify": stated_formula,
    }
    for name, verify in verifiers.items():
        small, large = (seconds(verify, unit, size) for size in (125_000, 500_000))
        assert large < 10 * small + 0.3, (name, small, large)


def test_the_reading_is_one_for_a_text_of_any_length():
    filler = "Then 3 more. " * 80_000
    assert sys.getsizeof(filler) > 1_000_000
    assert found_number(f"{filler}The answer is 42. {filler}").value == 42
    assert explicit_answer(f"{filler}\\boxed{{42}} {filler}") == "42"
