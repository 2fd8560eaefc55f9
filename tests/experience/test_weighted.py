"""Several verifiers with weights: names, sums, and the rule for a part without verdict."""

import math

import pytest

from kenpo.errors import InputError, UnknownNameError
from kenpo.experience.verdict import Sample, Verdict
from kenpo.experience.verifiers import load_verifier
from kenpo.experience.weighted import Weighted, part_names, read_weight

NAN = math.nan


class Table:
    """Verdicts by completion: a number, None (abstains), "error" or "timeout"."""

    def __init__(self, table):
        self.table, self.closed = table, False

    def score(self, samples):
        found = [self.table[s.completion] for s in samples]
        return [
            Verdict(NAN, x, None, f"why {x}") if isinstance(x, str)
            else Verdict(NAN, "abstain") if x is None else Verdict(float(x), "ok")
            for x in found
        ]  # fmt: skip

    def close(self):
        self.closed = True


def together(first, second, weights=(1.0, 0.2), groups=None):
    texts = list(first)
    groups = groups or [0] * len(texts)
    verifier = Weighted([Table(first), Table(second)], ["a", "b"], weights, "a b=0.2")
    return verifier.score([Sample(completion=t, answer="", group=g) for t, g in zip(texts, groups, strict=True)])


def test_the_reward_is_the_weighted_sum_and_the_parts_are_recorded():
    x, y = together({"x": 1, "y": 0}, {"x": 0.5, "y": -1})
    assert (x.reward, y.reward) == (1 + 0.2 * 0.5, 0.2 * -1)
    assert x.parts == {"a": 1.0, "b": 0.5}
    assert (x.status, y.status) == ("ok", "ok")


def test_a_part_that_abstains_on_the_whole_problem_is_left_out():
    x, y, z = together({"x": 1, "y": 0, "z": 1}, {"x": None, "y": None, "z": 3}, groups=[0, 0, 1])
    assert (x.reward, y.reward, z.reward) == (1.0, 0.0, 1.6)
    assert math.isnan(x.parts["b"])


def test_a_part_that_judges_some_of_a_problem_is_needed_for_all_of_it():
    x, y, z = together({"x": 1, "y": 0, "z": 1}, {"x": None, "y": 1, "z": 3})
    assert (x.status, math.isnan(x.reward)) == ("abstain", True)
    assert x.detail.startswith("b:")
    assert (y.reward, z.reward) == (0.2, 1.6)


@pytest.mark.parametrize("fault", ["error", "timeout"])
def test_a_part_that_fails_leaves_no_verdict(fault):
    x, y = together({"x": 1, "y": 1}, {"x": fault, "y": 1})
    assert (x.status, x.detail) == (fault, f"b: why {fault}")
    assert x.parts["a"] == 1.0
    assert y.reward == 1.2
    (alone,) = together({"x": 1}, {"x": fault})
    assert alone.status == fault


def test_nothing_judged_is_no_zero():
    (x,) = together({"x": None}, {"x": None})
    assert (x.status, math.isnan(x.reward)) == ("abstain", True)


def test_a_part_of_weight_zero_is_recorded_and_never_needed():
    x, y = together({"x": 1, "y": 0}, {"x": "error", "y": 7}, weights=(1.0, 0.0))
    assert (x.reward, y.reward) == (1.0, 0.0)
    assert y.parts == {"a": 0.0, "b": 7.0}
    (alone,) = together({"x": 1}, {"x": 1}, weights=(0.0, 0.0))
    assert alone.status == "abstain"


def test_negative_weights_and_samples_without_a_group():
    verdicts = together({"x": 1, "y": 1}, {"x": 2, "y": None}, weights=(1.0, -0.5), groups=[None, None])
    assert [v.reward for v in verdicts] == [0.0, 1.0]


def test_parts_of_parts_keep_their_names(tmp_path):
    (tmp_path / "a.py").write_text("def f(completion): return {'reward': 2.0, 'length': len(completion)}\n")
    (tmp_path / "b.py").write_text("def f(completions, answers): return [0.5] * len(completions)\n")
    with load_verifier([f"{tmp_path}/a.py:f=0.5", f"{tmp_path}/b.py:f", "numeric=2"], workers=1) as verifier:
        assert verifier.name == f"{tmp_path}/a.py:f=0.5 {tmp_path}/b.py:f numeric=2"
        (verdict,) = verifier.score([Sample(completion="7", answer="7")])
        assert len(verifier.processes()) == 2
    assert verdict.reward == 0.5 * 2.0 + 0.5 + 2 * 1.0
    assert verdict.parts == {"a.f": 2.0, "a.f.length": 1.0, "b.f": 0.5, "numeric": 1.0}
    assert verdict.answer == "7"
    assert verifier.processes() == []


def test_one_with_a_weight_is_scaled():
    with load_verifier("numeric=0.5") as verifier:
        (verdict,) = verifier.score([Sample(completion="7", answer="7")])
    assert (verdict.reward, verdict.parts) == (0.5, {"numeric": 1.0})


def test_names_of_parts():
    assert part_names(["a.py:f", "numeric", "b.py:g"]) == ["f", "numeric", "g"]
    assert part_names(["x/a.py:f", "b.py:f", "f.py:g"]) == ["a.f", "b.f", "g"]
    for twice in (["a.py:f", "a.py:f"], ["x/a.py:f", "y/a.py:f"], ["numeric", "numeric"]):
        with pytest.raises(InputError, match="two parts"):
            part_names(twice)


def test_weights_are_read_from_the_end():
    assert read_weight("runs/lr=1/a.py:f") == ("runs/lr=1/a.py:f", None)
    assert read_weight("runs/lr=1/a.py:f=2e-1") == ("runs/lr=1/a.py:f", 0.2)
    assert read_weight("exact=-1") == ("exact", -1.0)
    for bad in ("exact=nan", "exact=inf", "=1"):
        with pytest.raises(InputError, match="a weight is a finite number"):
            read_weight(bad)


def test_a_part_that_cannot_be_loaded_closes_the_others(tmp_path):
    import os

    path = tmp_path / "a.py"
    path.write_text(
        f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ndef f(completion): return 1.0\n"
    )
    for other, error in (("nosuch", UnknownNameError), (f"{tmp_path}/none.py:g", InputError)):
        with pytest.raises(error):
            load_verifier([f"{path}:f", other])
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
    with pytest.raises(InputError, match="none is named"):
        load_verifier([])
