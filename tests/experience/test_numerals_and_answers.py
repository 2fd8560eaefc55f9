"""Numbers in text, explicit answer forms, and the verifiers that compare in this process."""

import math
import time
from fractions import Fraction

import pytest

from kenpo.experience.answers import explicit_answer
from kenpo.experience.numerals import last_number, parse_number
from kenpo.experience.verifiers import Sample, load_verifier

NUMBERS = {
    "42": 42,
    "-3.5": "-7/2",
    ".5": "1/2",
    "+7": 7,
    "1,234,567": 1234567,
    r"1{,}234": 1234,
    r"1\,234": 1234,
    "3/4": "3/4",
    "3 1/4": "13/4",
    r"$\frac{3}{4}$": "3/4",
    r"3\frac{1}{4}": "13/4",
    r"-\frac12": "-1/2",
    "1.5e-3": "3/2000",
    r"1.5 \times 10^{-3}": "3/2000",
    "−7": -7,
    "50%": 50,
    r"50\%": 50,
    "$5": 5,
    "-$5": -5,
    "x = 17": 17,
    "17 apples": 17,
    "5cm": 5,
    "5 m": 5,
    r"42^\circ": 42,
    "08": 8,
    "5.": 5,
    17: 17,
    2.5: "5/2",
    0.1: "1/10",
}
NOT_NUMBERS = [
    "",
    "see figure",
    "2x",
    r"3\pi",
    "3*pi/2",
    "3*4",
    "(3, 4)",
    "3,14",
    "H2O",
    "10-3",
    "4/0",
    "sqrt(2)",
    "1 000",
    "1,2345",
    "2x+5y-1=0",
    "9" * 5000,
    True,
    None,
    math.nan,
    math.inf,
    [3],
    "1.2.3",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers(text):
    assert parse_number(text) == Fraction(NUMBERS[text])


@pytest.mark.parametrize("text", NOT_NUMBERS, ids=lambda value: repr(value)[:20])
def test_what_is_not_one_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10-3", 3),
        ("a 10 - 3", 3),
        ("it is -3", -3),
        ("x=-3", -3),
        ("so 3-5", 5),
        ("...42", 42),
        ("2+2=4.", 4),
        ("the cost is $1,234.50.", "2469/2"),
        ("8+3+1=12#1258", 1258),
        ("x_1 and x2", None),
        ("none", None),
        ("是42。", 42),
        ("3 1/4 cups", "13/4"),
        ("2/3", "2/3"),
        ("(−7)", -7),
    ],
)
def test_the_last_number_of_a_text(text, value):
    found = last_number(text)
    assert (found and found.value) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: $17$", "17"),
        (r"Answer: \boxed{17}", "17"),
        ("**Answer:** 42\nmore 3", "42"),
        ("Answer:\n42", "42"),
        ("The final answer is 3 + 4 = 7.", "3 + 4 = 7"),
        ("steps 5\n#### 1,000\n", "1,000"),
        (r"<answer>\boxed{12}</answer>", "12"),
        (r"\boxed{12}. So the answer is 13.", "12"),
        ("The answer is: **5**.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        ("answer: 3.5 m", "3.5 m"),
        (r"\boxed{1", None),
        ("no form 42", None),
        ("the answer is: ", None),
        ("", None),
        ("<answer>\nab\ncd.\n</answer>", "ab\ncd."),
    ],
)
def test_explicit_forms(text, answer):
    assert explicit_answer(text) == answer


def one(verifier, completion, answer, **more):
    return verifier.score([Sample(completion=completion, answer=answer, **more)])[0]


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("Answer: $17$", 17, 1),
        (r"Answer: \boxed{17}", "17", 1),
        ("It is 16. Answer: 17", 17, 1),
        ("2/3", 2, 0),
        (r"\boxed{3\pi}", 3, 0),
        ("answer: 3*4", 4, 0),
        ("1,000,001", 1000000, 0),
        ("1000001", 1000000, 0),
        ("0.333333", "1/3", 1),
        ("0.33", "1/3", 0),
        ("5/8", r"\frac{5}{8}", 1),
        ("3 1/4", "13/4", 1),
        ("-4", 4, 0),
        ("864+394=1258", 1258, 1),
        ("The answer is obvious. 42", 42, 1),
    ],
)
def test_numeric(completion, gold, reward):
    verdict = one(load_verifier("numeric"), completion, gold)
    assert (verdict.reward, verdict.status) == (reward, "ok")


def test_no_answer_is_counted_apart_from_a_wrong_one():
    wrong = one(load_verifier("numeric"), "it is 3", 4)
    unmatched = one(load_verifier("numeric"), "I do not know", 4)
    assert (wrong.reward, wrong.answer, wrong.detail) == (0, "3", "")
    assert (unmatched.reward, unmatched.answer, unmatched.detail) == (0, None, "no answer found")


@pytest.mark.parametrize("name", ["exact", "numeric", "gsm8k", "math_verify"])
def test_a_truncated_trace_is_not_scored_from_an_intermediate_value(name):
    with load_verifier(name) as verifier, load_verifier(name, keep_truncated=True) as keeping:
        verdict = one(verifier, "so far 6*7 = 42", "42", truncated=True)
        assert (verdict.reward, verdict.answer, verdict.detail) == (0.0, None, "truncated")
        if name in ("numeric", "gsm8k"):
            assert one(keeping, "so far 6*7 = 42", "42", truncated=True).reward == 1.0


def test_gold_that_is_not_a_number_abstains_for_all():
    for completion in ("a", "3", ""):
        verdict = one(load_verifier("numeric"), completion, "see figure")
        assert math.isnan(verdict.reward)
        assert verdict.status == "abstain"
        assert "see figure" in verdict.detail


def test_gsm8k():
    verifier = load_verifier("gsm8k")
    gold = "He has 3*4=<<3*4=12>>12.\n#### 1,200"
    for completion, reward in {"…\n#### 1200": 1, r"\boxed{1{,}200}": 1, "so 1200.": 1, "#### 12": 0, "12": 0}.items():
        assert one(verifier, completion, gold).reward == reward
    assert one(verifier, "#### 7", 7).reward == 1


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("Paris", "Paris", 1),
        ("  Paris \n", "Paris", 1),
        ("paris", "Paris", 0),
        ("Answer: Paris.", "Paris", 1),
        ("I think Paris", "Paris", 0),
        ("cafe\u0301", "caf\u00e9", 1),
        ("42", 42, 1),
        ("42.0", 42, 0),
        ("true", True, 1),
        ("1", True, 0),
        ("[1, 2]", [[1, 2], [2]], 1),
        ("[1, 2]", [1, 2], 0),
        (r"\boxed{[2, 1]}", [[1, 2]], 0),
        ('{"b": 1, "a": 2}', {"a": 2, "b": 1}, 1),
        ("[" * 50_000, [[1]], 0),
        ("", "x", 0),
    ],
)
def test_exact_compares_plain_data_of_one_type(completion, gold, reward):
    assert one(load_verifier("exact"), completion, gold).reward == reward


def test_samples_are_keyword_only_so_that_a_swap_is_impossible():
    with pytest.raises(TypeError):
        Sample("completion", "answer")  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "1 " * 500_000,
        "9" * 10**6,
        "answer is " * 100_000,
        r"\boxed{" * 150_000,
        "<answer>" * 120_000,
        "1,111" * 200_000,
        "-" * 10**6,
        "#### " * 200_000,
        " " * 10**6,
        r"\frac{1}" * 120_000,
        "1/" * 500_000,
        "$" * 10**6,
        "1e" * 500_000,
    ],
    ids=lambda text: text[:8],
)
def test_a_million_characters_take_linear_time(text):
    start = time.monotonic()
    for name in ("exact", "numeric", "gsm8k"):
        assert one(load_verifier(name), text, "12345678").reward == 0.0
    assert time.monotonic() - start < 10
