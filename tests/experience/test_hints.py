"""Hints: whose they are, where they stand, and what lacks one."""

import pytest
import tiny

from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError
from kenpo.experience.hints import HINT, HintOptions, Hints, hinted
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.verdict import Verdict

PLAIN = "{prompt}|{hint}"


@pytest.fixture
def prompts():
    return Prompts(tiny.llama(300), tiny.byte_tokenizer(), None, 8)


def episodes(*texts):
    return [Episode((given([5]), Segment([6], True, [-1.0])), text=t) for t in texts]


def shown(hints, problem, said, rewards):
    """The text of each row's hinted prompt, None where it has none."""
    made = hints.beside(problem, episodes(*said), [Verdict(r, "ok") for r in rewards])
    decode = hints.prompts.tokenizer.decode
    return [decode(e.contexts[HINT]) if HINT in e.contexts else None for e in made]


def test_a_peer_is_the_first_other_success(prompts):
    hints = Hints(prompts, HintOptions(template=PLAIN))
    said = ["wrong", "<think>so</think> right", "also", "nan"]
    found = shown(hints, Problem(1, "q", "a"), said, [0.0, 1.0, 0.5, float("nan")])
    assert found == ["q|right", "q|also", "q|right", "q|right"]


def test_a_lone_success_gets_none(prompts):
    hints = Hints(prompts, HintOptions(template=PLAIN))
    assert shown(hints, Problem(1, "q", "a"), ["x", "y"], [0.0, 1.0]) == ["q|y", None]
    assert shown(hints, Problem(1, "q", "a"), ["x", "y"], [0.4, 0.4]) == [None, None]


def test_a_column_shows_every_row_the_same(prompts):
    hints = Hints(prompts, HintOptions("solution", template=PLAIN))
    problem = Problem(1, "q", "a", {"solution": 42}, "data.jsonl: line 3")
    assert shown(hints, problem, ["x", "y"], [0.0, 0.0]) == ["q|42", "q|42"]
    for extra in ({}, {"solution": " "}, {"solution": None}):
        with pytest.raises(InputError, match=r"line 3: no hint in column 'solution'.*--hint-column"):
            hints.check([Problem(1, "q", "a", extra, "data.jsonl: line 3")])


def test_templates():
    options = HintOptions(template="{hint} then {prompt}")
    assert hinted("a {hint}", "b {prompt}", options) == "b {prompt} then a {hint}"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert hinted(chat, "h", options) == [chat[0], {"role": "user", "content": "h then q"}]
    for bad in ("{prompt}", "{hint}{hint}{prompt}", "none"):
        with pytest.raises(InputError, match="hint-template"):
            HintOptions(template=bad)


def test_a_row_whose_hint_and_response_exceed_the_context_has_none(prompts):
    hints = Hints(prompts, HintOptions("hint", template=PLAIN))
    problem = Problem(1, "q", "a", {"hint": "h" * 61})
    short, long = (Episode((given([5]), Segment([6] * n, True, [-1.0] * n))) for n in (1, 2))
    made = hints.beside(problem, [short, long], [Verdict(0.0, "ok")] * 2)
    assert [HINT in e.contexts for e in made] == [True, False]
    with pytest.raises(InputError, match="context of 64"):
        hints.check([Problem(1, "q", "a", {"hint": "h" * 80})])
