"""`math_verify` as Kenpo calls it: field cases of answer parsing and comparison."""

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kenpo.experience
from kenpo.experience.verifiers import Sample, load_verifier

pytest.importorskip("math_verify")
WORKER = Path(kenpo.experience.__path__[0]) / "worker.py"

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
    ("1258", "4+4+0=08;6+9+0=15;8+3+1=12#1258"),
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

MORE_EQUAL = [  # lists, roots, times, percent, several answers, explanations, choices, tiny numbers, units
    ('19, 46, \\text{ and } 82', '19, 46, and 82'), ('1, 2, or 3', '\\boxed{1,2,3}'),
    ('x=1, or x=2', '\\boxed{x=2, x=1}'), ('x=1, or x=2', '\\boxed{1,2}'), ('1 \\text{ or } 2', '2, 1'),
    ('1, 2, \\mbox{and } 3', '$1,2,3$'), ('5 and 7', 'The answers are 7 and 5.'), ('\\sqrt[3]{2}', '\\sqrt[3]2'),
    ('\\sqrt[3]4', '4^{1/3}'), ('2\\sqrt[4]3', '\\boxed{2 \\sqrt[4]{3}}'), ('\\sqrt [3] {5}', '\\sqrt[3]5'),
    ('cbrt(2)', '\\sqrt[3]{2}'), ('\\sqrt[n]x', '\\sqrt[n]{x}'), ('12:00', '12:00'),
    ('10:00', '\\boxed{\\text{10:00}}'), ('6:30', '6:30 PM'), ('06:30', '\\boxed{6:30}'), ('3:2', '6:4'),
    ('1:2:3', '2:4:6'), ('3:4', '3/4'), ('35 percent', '0.35'), ('35 percent', '35%'), ('35%', '35 percent'),
    ('35\\%', '\\boxed{0.35}'), ('0.35', '35 percent'), ('35 \\text{ percent}', '0.35'), ('35', '35%'),
    (['5', '4'], '\\boxed{4}'), ([4, 5], '4'), (True, 'Yes'), (True, 'true'), (False, '\\boxed{\\text{No}}'),
    ('42', 'The final answer is 42 when n = 5.'), ('42', 'The answer is 42 (for k = 3).'),
    ('42', 'The answer is 42, not 41.'), ('42', 'The answer is 42, where x = 7.'),
    ('\\frac{\\pi}{2}', 'The answer is $\\frac{\\pi}{2}$, where we used radians.'), ('B', 'The answer is (B).'),
    ('B', 'B) Paris'), ('(B)', '\\boxed{\\text{B}}'), ('\\text{(B)}', '**B**'), ('0.\\overline{3}', '1/3'),
    ('1/3', '\\boxed{0.\\overline{3}}'), ('\\{0.\\overline{3}, 2\\}', '\\{2, 1/3\\}'), ('10^{-20}', '1e-20'),
    ('1.0\\times10^{-8}', '10^{-8}'), ('e^{-50}', '\\frac{1}{e^{50}}'), ('\\frac{1}{50!}', '1/50!'),
    ('\\sqrt{2}', '1.41421356'), ('\\pi', '3.14159'), ('0', '0.0'), ('\\sin(\\pi)', '0'), ('2^{10}', '1024'),
    ('1024', '2^{10}'), ('5 \\text{ cm}', '5 centimeters'), ('5', '5 cm'), ('25 cm^2', '25 square centimeters'),
    ('\\$5', '5 dollars'), ('$5', '5'), ('x^2+1', '1 + x^2'), ('0.5x', '\\frac{x}{2}'), ('1/6', '0.166667'),
    ('\\frac{1}{3} \\approx 0.333', '1/3'), ('\\{10^{-20}, 1\\}', '\\{1, 10^{-20}\\}'), ('x = 10^{-20}', '10^{-20}'),
    ('\\begin{pmatrix} 0.5 \\\\ 1 \\end{pmatrix}', '\\begin{pmatrix} 1/2 \\\\ 1 \\end{pmatrix}'),
    ('(1,2)', '\\left(1, 2\\right)'), ('[0, \\infty)', '[0, oo)'), ('x \\ge 0', '[0,\\infty)'),
    ('42', '\\boxed{42}\n\nI checked that the answer is right.'), ('-5', '\\boxed{-5}'), ('1,000', '1000'),
    ('\\text{Paris}', '\\boxed{\\text{Paris}}'), ('even', 'The answer is even.'), ('3+4i', '\\boxed{4i+3}'),
    ('\\mathbb{R}', '\\boxed{\\mathbb{R}}'), ('\\emptyset', '\\boxed{\\emptyset}'), ('\\pm 5', '5, -5'),
    ('5,-5', '\\pm 5'), ('x=\\pm 5', 'x = 5 or x = -5'), ('3\\frac{1}{2}', '3.5'), ('90^\\circ', '90 degrees'),
    ('42', 'so\n```\n42\n```'), ('2\\pi', 'The area is $2\\pi$.'), ('\\infty', 'infinity'), ('-\\infty', '-oo'),
    ('(2, \\frac{\\pi}{3})', '\\left(2,\\frac{\\pi}{3}\\right)'), ('\\frac{3}{4}', '3/4'), ('7', 'x = 3 + 4 = 7'),
    ('1 + 2i', '1+2i'), ('100\\,000', '100000'), ('42', 'about 42'), ('\\frac{1}{2}', '0.5'),
    ('no solution', '\\boxed{\\text{no solution}}'), ('\\text{no solution}', 'No solution.'),
]  # fmt: skip
MORE_STATED = [  # answers beside another equation, labels of choices, sizes
    ("42", "The answer is 42 and x = 7."), ("42", "The answer is 42, x = 7."), ("B", r"\boxed{\textbf{(B)}\ 12}"),
    ("42", r"\boxed{\Large 42}"), (r"\sqrt[3]{\frac{1}{2}}", r"\boxed{\sqrt[3]\frac{1}{2}}"),
]  # fmt: skip
MORE_DIFFERENT = [  # tiny numbers, times, lists, alternatives, units
    ('1.0\\times10^{-8}', '\\boxed{0.0}'), ('3.2\\times10^{-5}', '\\boxed{3.25\\times10^{-5}}'),
    ('0.0000005', '\\boxed{-0.0000002}'), ('\\frac{1}{50!}', '\\boxed{\\frac{1}{49!}}'),
    ('e^{-60}', '\\boxed{e^{-50}}'), ('10^{-20}', '10^{-21}'),
    ('\\frac{1}{3\\cdot 2^{206}}', '\\frac{2^{205}+1}{3\\cdot 2^{206}}'), ('0.0004', '0.000401'),
    ('x=10^{-20}', 'x=10^{-21}'), ('\\{10^{-20},1\\}', '\\{10^{-21},1\\}'), ('[0,10^{-20}]', '[0,10^{-21}]'),
    ('10^{-20}x', '10^{-21}x'), ('x<10^{-20}', 'x<10^{-21}'), ('\\sin(10^{-20})', '\\sin(10^{-21})'),
    ('1.6\\times10^{-19}', '9.1\\times10^{-31}'), ('1+10^{-20}', '1'),
    ('\\begin{pmatrix} 10^{-20} \\\\ 1 \\end{pmatrix}', '\\begin{pmatrix} 10^{-21} \\\\ 1 \\end{pmatrix}'),
    ('10^{-20}', '0'), ('0', '10^{-20}'), ('2^{-100}', '0.0'), ('6:30', '1:5'), ('6:30', '6:31'),
    ('6:30 AM', '6:30 PM'), ('1:5', '1:05'), ('1:2:3', '1:2:4'), ('12:00', '1:00'), ('1, 2, and 3', '1, 2'),
    ('1,2', '1,3'), (['5', '4'], '6'), (['5', '4'], '5 or 4'), (True, 'No'), ('025', '25'), ('5 m', '5 s'),
    ('5 cm', '50 mm'), ('B', '(C)'), ('42', 'The answer is 41, where x = 42.'), ('42', 'The answer is 42 or 43.'),
    ('1000000', '1000001'), ('\\sqrt{2}', '1.41'), ('42', '\\boxed{\\text{no solution}}'),
    ('\\text{Paris}', 'London'), ('3+4i', '3-4i'), ('3+10^{-20}i', '3'), ('0.0000001x', '0.0000002x'),
    ('x^2', 'x^2+10^{-20}'), ('(0,10^{-20})', '(0,10^{-21})'), ('35%', '3.5'), ('35%', '0.0035'),
    ('7', 'x = 3 + 4 = 8'),
]  # fmt: skip


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


def test_neighbours_of_equal_pairs(verifier):
    pairs = MORE_EQUAL + MORE_STATED
    wrong = [(p, v) for p, v in zip(pairs, score(verifier, pairs), strict=True) if v.reward != 1.0]
    assert wrong == []


def test_neighbours_of_different_pairs(verifier):
    wrong = [(p, v) for p, v in zip(MORE_DIFFERENT, score(verifier, MORE_DIFFERENT), strict=True) if v.reward != 0.0]
    assert wrong == []


def test_several_golds_of_which_one_cannot_be_read_abstain(verifier):
    (verdict,) = score(verifier, [(["see figure", "4"], "4")])
    assert verdict.status == "abstain"


def test_the_worker_loads_no_torch():
    """Each worker would need seconds and hundreds of megabytes more."""
    program = (
        "import sys; sys.argv = ['worker']; from runpy import run_path\n"
        f"space = run_path({str(WORKER)!r})\n"
        "handle, _ = space['_mathematics']({}, None)\n"
        "assert handle({'gold': ['1/2'], 'found': '0.5'})['reward'] == 1.0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=WORKER.parent, env={"PATH": ""})


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
