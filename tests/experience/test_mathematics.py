"""`math_verify` as Kenpo calls it: field cases of answer parsing and comparison."""

import math
import threading

import pytest

from kenpo.experience.verifiers import Sample, load_verifier

pytest.importorskip("math_verify")

EQUAL = [
    (r"\frac{5}{8}", "5/8"),
    ("3 1/4", "13/4"),
    (r"$3\frac{1}{4}$", "3.25"),
    ("3.25", "3 1/4"),
    (r"$\text{42}$", "$42$"),
    (r"$x>4$", r"$(4,\infty)$"),
    (r"$\frac{3\pi}{2}$", "3*pi/2"),
    (r"$-4\pi$", "-4*pi"),
    ("-4*pi", r"-4\pi"),
    (r"$\sqrt{1/m}$", r"$\frac{1}{\sqrt{m}}$"),
    ("17", "Answer: $17$"),
    ("17", r"Answer: \boxed{17}"),
    (r"$5\text{ cm}$", "5 cm"),
    (r"5\text{ m}", "5m"),
    ("5 m", "5"),
    ("17", "17 dollars"),
    (r"25\text{ cm}^2", "25 cm^2"),
    (r"10\text{ minutes}", "10 min"),
    (r"$\{1,2\}$", r"\boxed{\{2,1\}}"),
    (r"\{1,2\}", "{1, 2}"),
    ("1,234", "1234"),
    ("[1,2)", r"\boxed{[1,2)}"),
    ("x=5", "5"),
    ("50%", "0.5"),
    ("A", "(A)"),
    (r"\text{(A)}", "A"),
    ("x**2+2*x+1", "(x+1)^2"),
    ("1/3", "0.333333"),
    ("sqrt(2)/2", r"\frac{1}{\sqrt{2}}"),
    ("Yes", "yes"),
    (r"\text{even}", "even"),
    ("x=5 or x=-5", "x=-5, x=5"),
    (r"x \in [1,2)", "[1,2)"),
    (r"(-\infty, 1) \cup (2, \infty)", "(-inf,1) U (2,oo)"),
    ("x<=3", r"(-\infty,3]"),
    (r"90^\circ", "90°"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("e^{x}", "exp(x)"),
    ("$2x+5y-1=0$", "2x+5y-1=0"),
    (r"\log_2 8", "3"),
    ("so x = 2\n#### 7", "7"),
    (7, "7"),
    ("42", "so we get 42 in all"),
]
DIFFERENT = [
    ("2x+5y-1=0", "x-y+4=0"),
    ("$(4,\\infty)$", "$x>4$"),
    ("$x<3$", "$(1,2)$"),
    ("3*pi/2", "3/2"),
    ("$|x|$", "x"),
    (r"\sqrt{x^2}", "x"),
    ("g(x)=0", "for all x>0, g(x)=0"),
    ("5 m", "5 s"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("[1,2)", "(1,2)"),
    ("2/3", "2"),
    ("1/3", "0.33"),
    ("Yes", "no"),
    ("A", "B"),
    ("1000000", "1000001"),
    ("x^2", "x^3"),
    ("4", "four"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("4", ""),
    ("5 cm", "5 mm"),
    ("5 cm", r"\boxed{50\,\text{mm}}"),
    (r"10\text{ minutes}", "600 seconds"),
]


@pytest.fixture(scope="module")
def verifier():
    with load_verifier("math_verify", time_limit=20.0, workers=1) as made:
        yield made


def score(verifier, pairs):
    return verifier.score([Sample(completion=answer, answer=gold) for gold, answer in pairs])


def test_equal_pairs(verifier):
    wrong = [(p, v) for p, v in zip(EQUAL, score(verifier, EQUAL), strict=True) if v.reward != 1.0]
    assert wrong == []


def test_different_pairs(verifier):
    wrong = [(p, v) for p, v in zip(DIFFERENT, score(verifier, DIFFERENT), strict=True) if v.reward != 0.0]
    assert wrong == []


def test_a_gold_that_cannot_be_read_abstains_for_everyone(verifier):
    for verdict in score(verifier, [("see figure", text) for text in ("a", "b", "see figure", "", "3")]):
        assert math.isnan(verdict.reward)
        assert verdict.status == "abstain"
        assert "see figure" in verdict.detail


def test_an_answer_that_cannot_be_read_abstains_and_is_no_silent_zero(verifier):
    (verdict,) = score(verifier, [("1/3", r"\boxed{0.\overline{3}\frac}")])
    assert math.isnan(verdict.reward)
    assert verdict.status == "abstain"


def test_it_works_from_a_thread_and_stays_bounded():
    found = []
    with load_verifier("math_verify", time_limit=2.0, workers=1) as made:
        pairs = [(r"\frac{2}{7}", "2/7"), ("7", "9^{9^{9^{9}}}"), (r"\frac{2}{7}", "2/7")]
        thread = threading.Thread(target=lambda: found.extend(score(made, pairs)))
        thread.start()
        thread.join(60)
    assert [v.status for v in found][::2] == ["ok", "ok"]
    assert [v.reward for v in found][::2] == [1.0, 1.0]
    assert found[1].status in ("timeout", "error")
    assert math.isnan(found[1].reward)


def test_a_huge_answer_is_wrong_not_an_error(verifier):
    (verdict,) = score(verifier, [("7", r"\boxed{" + "1+" * 500_000 + "1}")])
    assert verdict.status == "ok"
    assert verdict.reward == 0.0
