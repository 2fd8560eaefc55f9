"""Reward functions get what their parameters ask for: the guide's table, row by row, and what it does not show."""

import json
import math
import re
from pathlib import Path

import pytest

from kenpo.errors import InputError
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Sample
from kenpo.experience.verifiers import load_verifier

GUIDE = Path(__file__).parents[2] / "docs/guides/own-verifier.md"
ROWS = re.findall(r"^\| `((?:async )?def [^`]*)` \| ([^|]*) \| ([^|]*) ?\|$", GUIDE.read_text(), flags=re.M)


class Task:
    """Rows with a column `level`."""

    name, verifier, system, ids = "rows", "exact", None, None

    def __init__(self, **extra):
        self.extra = extra or {"level": 3}

    def train(self, index):
        return Problem(id=index, prompt="p", answer="a", extra=self.extra)


def samples(prompt="p", group=0, texts=("c0", "c1"), **extra):
    return [
        Sample(completion=text, answer="a", prompt=prompt, truncated=i == 1, extra=extra or {"level": 3}, group=group)
        for i, text in enumerate(texts)
    ]


@pytest.fixture
def load(tmp_path):
    """A verifier from source: function `f` unless named, one worker, the task above."""
    loaded = []

    def from_source(source, function="f", task=None, **options):
        path = tmp_path / f"r{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        options = {"workers": 1, "task": task or Task(), **options}
        loaded.append(load_verifier(f"{path}:{function}", **options))
        return loaded[-1]

    yield from_source
    for verifier in loaded:
        verifier.close()


# What the names mean, written down apart from the code: for the second of two samples, and for both.
ONE = {
    "completion": "c1", "answer": "a", "prompt": "p", "truncated": True, "level": 3, "strict": True,
    "solution_str": "c1", "ground_truth": "a", "data_source": "rows", "extra_info": {"level": 3},
}  # fmt: skip
BOTH = {
    "completions": ["c0", "c1"], "answers": ["a", "a"], "answer": ["a", "a"], "prompts": ["p", "p"],
    "truncated": [False, True], "level": [3, 3],
    "solution_strs": ["c0", "c1"], "ground_truths": ["a", "a"], "data_sources": ["rows", "rows"],
    "extra_infos": [{"level": 3}, {"level": 3}],
}  # fmt: skip
REST = {"row": {"prompt": "p", "truncated": True, "level": 3}}
REST_OF_BOTH = {"def f(prompts, completions, **kwargs)": {"answer", "answers", "truncated", "level"},
                "def f(completions, answer, **kwargs)": {"answers", "prompts", "truncated", "level"}}  # fmt: skip


def test_the_table_has_twelve_signatures_that_work_or_say_why_not():
    assert len(ROWS) >= 12
    assert {form.strip() for _, form, _ in ROWS} == {
        "one completion", "a group", "TRL", "verl", "verl, a batch", "refused"
    }  # fmt: skip


@pytest.mark.parametrize(("signature", "form", "fault"), ROWS, ids=[row[0] for row in ROWS])
def test_every_row_of_the_guides_table(load, tmp_path, signature, form, fault):
    lists = form.strip() in ("a group", "TRL", "verl, a batch")
    out = "[1.0, 2.0]" if lists else "2.0"
    seen = tmp_path / "seen.jsonl"
    write = f"open({str(seen)!r}, 'a').write(json.dumps(locals(), default=str) + '\\n')"
    body = f"    import json\n    {write}\n    return {out}\n"
    if form.strip() == "refused":
        with pytest.raises(InputError, match=re.escape(fault.strip())) as caught:
            load(f"{signature}:\n{body}")
        assert "\n" not in str(caught.value)
        assert "completion" in str(caught.value)
        return
    verifier = load(f"{signature}:\n{body}")
    assert verifier.form == form.strip()
    verdicts = verifier.score(samples())
    assert [v.reward for v in verdicts] == ([1.0, 2.0] if lists else [2.0, 2.0]), verdicts
    got = json.loads(seen.read_text().splitlines()[-1])
    got.pop("json")
    rest = got.pop("kwargs", None)
    expected = {n: REST[n] if n in REST else (BOTH if lists else ONE)[n] for n in got}
    assert got == expected
    if rest is not None:
        assert rest == {n: BOTH[n] for n in REST_OF_BOTH[signature]}
    assert seen.read_text().count("\n") == (1 if lists else 2)


def test_columns_and_defaults_in_any_order(load):
    source = "def f(strict=False, *, level, answer='none', completion): return level + 10 * (answer == 'a') + strict\n"
    assert [v.reward for v in load(source).score(samples())] == [13.0, 13.0]


def test_a_column_never_takes_the_place_of_what_kenpo_hands_over(load):
    verifier = load(
        "def f(completion, answer, prompt): return float((completion, answer, prompt) == ('c0', 'a', 'p'))",
        task=Task(completion="no", answer="no", prompt="no"),
    )
    extra = {"completion": "no", "answer": "no", "prompt": "no"}
    assert verifier.score([Sample(completion="c0", answer="a", prompt="p", extra=extra)])[0].reward == 1.0


def test_the_answer_goes_by_the_name_of_its_column_too(load):
    one = load("def f(completion, solution): return float(solution == 'a')", answer_column="solution")
    many = load(
        "def f(completions, solution, **kw): return [float(s == 'a') for s in solution]", answer_column="solution"
    )
    assert [v.reward for v in one.score(samples()) + many.score(samples())] == [1.0] * 4
    path = load("def f(completion, truth): return float(truth == 'a')", answer_column="reward_model.truth")
    assert path.score(samples())[0].reward == 1.0
    with pytest.raises(InputError, match="asks for 'solution'"):
        load("def f(completion, solution): return 1.0")


def test_a_column_that_only_some_rows_have_is_known(tmp_path):
    from kenpo.experience.tasks import load_task

    data = tmp_path / "d.jsonl"
    rows = [{"prompt": f"{i}", "answer": "1", **({"hint": "h"} if i > 10 else {})} for i in range(20)]
    data.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "r.py"
    path.write_text("def f(completion, hint): return 1.0\n")
    with load_verifier(f"{path}:f", task=load_task(str(data)), workers=1) as verifier:
        with_hint, without = verifier.score([*samples(texts=("c",), hint="h"), *samples(texts=("c",), other=1)])
    assert with_hint.reward == 1.0
    assert without.status == "error"
    assert "hint" in without.detail


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(text, gold): return 1.0", "rename 'text' to 'completion', 'gold' to 'answer'"),
        ("def f(gold, prediction): return 1.0", "rename"),
        ("def f(): return 1.0", "takes no completion"),
        ("def f(level): return 1.0", "takes no completion"),
        ("def f(completion, reference): return 1.0", "rename 'reference' to 'answer'"),
        ("def f(completion, *, temperature): return 1.0", "'temperature'"),
        ("def f(data_source, solution_str, ground_truth, tokenizer): return 1.0", "'tokenizer'"),
        ("def f(solution_str, completion): return 1.0", "takes both"),
        ("def f(prompts, completions, trainer_state): return 1.0", "'trainer_state'"),
        ("class f:\n    def __call__(self, completion): return 1.0", "is a class"),
        ("f = lambda x: 1.0", "takes no completion"),
    ],
)
def test_neighbours_that_are_refused_with_the_mend(load, source, words):
    with pytest.raises(InputError) as caught:
        load(source)
    message = str(caught.value)
    for part in words.split(", "):
        assert part.removeprefix("rename ") in message
    assert "\n" not in message
    assert "LookupError" not in message


def test_other_kinds_of_callable(load):
    source = """
import functools
def base(weight, completion, answer): return weight * (answer == "a")
f = functools.partial(base, 2.0)
def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs): return function(*args, **kwargs)
    return call
@wrapped
def g(prompt, completion): return float((prompt, completion) == ("p", "c0"))
class Async:
    async def __call__(self, completion, answer): return float((completion, answer) == ("c0", "a"))
h = Async()
def lazy(completion, answer):
    async def later(): return float(completion == "c0")
    return later()
class Methods:
    def score(self, completions, answers): return [len(c) + (a == "a") for c, a in zip(completions, answers)]
m = Methods().score
"""
    first = samples()[:1]
    for name, expected in {"f": 2.0, "g": 1.0, "h": 1.0, "lazy": 1.0, "m": 3.0}.items():
        assert load(source, name).score(first)[0].reward == expected, name


def test_trl_completions_are_messages_where_the_prompt_is(load):
    source = """
def plain(prompts, completions, **kw): return [float(isinstance(c, str)) for c in completions]
def told(completions: list[list[dict[str, str]]], **kw): return [float(c[0]["content"] == "c0") for c in completions]
def texts(completions: list[str], **kw): return [float(isinstance(c, str)) for c in completions]
def ours(completions, answers): return [float(isinstance(c, str)) for c in completions]
def role(completions, **kw): return [float(c == [{"role": "assistant", "content": "c0"}]) for c in completions]
"""
    chat = [{"role": "user", "content": "p"}]
    expected = {"plain": (1.0, 0.0), "told": (1.0, 1.0), "texts": (1.0, 1.0), "ours": (1.0, 1.0), "role": (0.0, 1.0)}
    for name, (as_text, as_chat) in expected.items():
        verifier = load(source, name)
        (one,), (other,) = (verifier.score(samples(prompt=p, texts=("c0",))) for p in ("p", chat))
        assert (one.reward, other.reward) == (as_text, as_chat), name


def test_verls_columns_and_its_dict(load):
    source = """
def f(data_source, solution_str, ground_truth, extra_info=None, **kw):
    right = (data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "c0", "a", {"index": 7})
    return {"score": float(right), "acc": right, "pred": "42", "format": 0.5}
"""
    extra = {"data_source": "gsm8k", "extra_info": {"index": 7}}
    (verdict, *_) = load(source, task=Task(**extra)).score(samples(**extra))
    assert (verdict.reward, verdict.parts) == (1.0, {"acc": 1.0, "format": 0.5})


def test_groups_are_whole_and_apart(load):
    verifier = load("def f(completions, answers): return [len(completions) + float(c[1:]) / 10 for c in completions]")
    mixed = [*samples(group=5), *samples(group=6, texts=("c2", "c3", "c4")), *samples(group=None), *samples(group=5)]
    assert [v.reward for v in verifier.score(mixed)] == [4.0, 4.1, 3.2, 3.3, 3.4, 1.0, 1.1, 4.0, 4.1]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("[1.0]", "1 rewards for 2 completions"),
        ("1.0", "a float, not a list of 2"),
        ("{'reward': [1.0, 2.0]}", "a dict, not a list of 2"),
        ("['1', '2']", "a str, not a number"),
        ("[[1.0], [2.0]]", "a list, not a number"),
        ("[1.0, float('inf')]", "inf"),
    ],
)
def test_group_results_of_another_shape_are_errors_of_the_whole_group(load, result, words):
    for verdict in load(f"def f(completions, answers): return {result}").score(samples()):
        assert verdict.status == "error"
        assert words in verdict.detail


def test_group_results_entry_by_entry(load):
    source = """
import numpy
def f(completions, answers): return [None, {"reward": 2, "right": True}, float("nan")]
def g(completions, answers): return numpy.array([1.0, numpy.nan, 3.0])
"""
    three = samples(texts=("c0", "c1", "c2"))
    none, full, nan = load(source, "f").score(three)
    assert (none.status, full.reward, full.parts, nan.status) == ("abstain", 2.0, {"right": 1.0}, "abstain")
    assert [v.status for v in load(source, "g").score(three)] == ["ok", "abstain", "ok"]


def test_async_samples_of_a_group_wait_side_by_side_and_fail_alone(load):
    source = """
import asyncio
async def f(completion, answer):
    if completion == "c1": raise ValueError("alone")
    if completion == "c2": await asyncio.sleep(60)
    if completion == "c3": raise TimeoutError("of its own")
    await asyncio.sleep(0.6)
    return 1.0
"""
    import time

    verifier = load(source, time_limit=1.5)
    began = time.monotonic()
    verdicts = verifier.score(samples(texts=("c0", "c1", "c2", "c3", *["x"] * 6)))
    assert time.monotonic() - began < 5
    assert [v.status for v in verdicts] == ["ok", "error", "timeout", "error", *["ok"] * 6]
    assert "alone" in verdicts[1].detail
    assert "of its own" in verdicts[3].detail


@pytest.mark.parametrize("name", ["../up", "two\nlines", "a b", "", "x" * 65, 3, "\x1b[2J", "-x"])
def test_a_part_with_an_odd_name_is_an_error(load, name):
    (verdict, *_) = load(f"def f(completion): return {{'reward': 1.0, {name!r}: 2.0}}").score(samples())
    assert verdict.status == "error"
    assert "part of the reward" in verdict.detail
    assert verdict.detail.isprintable()


def test_parts_are_finite_numbers_or_nothing(load):
    source = """
def f(completion):
    value = {"c0": float("inf"), "c1": None, "c2": float("nan"), "c3": "1", "c4": -float("inf")}[completion]
    return {"reward": 1.0, "part": value}
"""
    inf, none, nan, text, minus = load(source).score(samples(texts=("c0", "c1", "c2", "c3", "c4")))
    assert [v.status for v in (inf, none, nan, text, minus)] == ["error", "ok", "ok", "error", "error"]
    assert "'part' is inf" in inf.detail
    assert all(math.isnan(v.parts["part"]) for v in (none, nan))
