"""Judging goes on beside sampling, and changes nothing."""

import threading
import time

import pytest

from kenpo.engines.base import Engine, SamplingOptions
from kenpo.episode import Episode, Segment, given
from kenpo.errors import VerifierError
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.judge import Judge, all_stop, judge
from kenpo.experience.problem import Problem
from kenpo.experience.source import BatchOptions, OnPolicy
from kenpo.experience.verdict import Verdict
from kenpo.ranks import Ranks


def episode(text):
    return Episode((given([7]), Segment([1], sampled=True, logp=[-0.5], version=0)), text=text)


class Slow:
    """A verifier that takes `seconds` for a call; the reward is the completion's number over the problem's answer."""

    name = "slow"

    def __init__(self, seconds=0.0, fail_at=None):
        self.seconds, self.fail_at, self.calls, self.threads = seconds, fail_at, [], set()

    def score(self, samples):
        self.threads.add(threading.current_thread().name)
        self.calls.append([s.group for s in samples])
        time.sleep(self.seconds)
        if self.fail_at is not None and any(s.completion == self.fail_at for s in samples):
            raise VerifierError(f"gave up at {self.fail_at}")
        return [Verdict(float(s.completion) / s.answer, "ok") for s in samples]


PROBLEMS = [Problem(i, f"p{i}", i + 1) for i in range(6)]
GROUPS = [[episode(str(10 * i + j)) for j in range(1 + i % 3)] for i in range(6)]


def test_verdicts_are_those_of_one_call_in_any_order_and_any_batches():
    whole = judge(Slow(), PROBLEMS, GROUPS)
    for order, pause in (([0, 1, 2, 3, 4, 5], 0.0), ([5, 2, 0, 4, 1, 3], 0.02)):
        verifier = Slow(0.01)
        with Judge(verifier) as judges:
            for i in order:
                time.sleep(pause)
                judges.put(i, PROBLEMS[i], GROUPS[i])
            found = judges.verdicts()
        assert [found[i] for i in range(6)] == whole
        assert verifier.threads == {"kenpo-judge"}


def test_a_group_is_never_split_and_groups_never_merge():
    verifier = Slow(0.02)
    with Judge(verifier) as judges:
        for i in range(6):
            judges.put(i, PROBLEMS[i], GROUPS[i])
        judges.verdicts()
    sizes = [call.count(g) for call in verifier.calls for g in dict.fromkeys(call)]
    assert sizes == [len(group) for group in GROUPS]


def test_nothing_to_judge():
    with Judge(Slow()) as judges:
        assert judges.verdicts() == {}


def test_what_the_verifier_raises_stops_the_sampling():
    with Judge(Slow(fail_at="10")) as judges:
        judges.put(0, PROBLEMS[0], GROUPS[0])
        judges.put(1, PROBLEMS[1], GROUPS[1])
        judges._thread.join(10)
        with pytest.raises(VerifierError, match="gave up at 10"):
            judges.put(2, PROBLEMS[2], GROUPS[2])
        with pytest.raises(VerifierError):
            judges.verdicts()


class SlowEngine(Engine):
    """Takes `seconds` for an episode."""

    version = 0

    def __init__(self, seconds):
        self.seconds = seconds

    def sample(self, requests, done=None):
        made = []
        for i, _ in enumerate(requests):
            time.sleep(self.seconds)
            made.append(episode("1"))
            done(i, made[-1])
        return made

    def update(self, weights, version):
        self.version = version


class Prompts:
    def encode(self, problem):
        return [1]


def test_an_evaluation_judges_while_it_samples():
    verifier = Slow(0.3)
    evaluator = Evaluator(PROBLEMS, SlowEngine(0.15), Prompts(), verifier, Ranks(), SamplingOptions(), batch=2)
    began = time.monotonic()
    outcome, records = evaluator.run()
    seconds = time.monotonic() - began
    assert [r["reward"] for r in records] == [1 / (i + 1) for i in range(6)]
    assert outcome.correct == 1
    assert seconds < 6 * 0.15 + len(verifier.calls) * 0.3 - 0.2  # less than one after the other


def test_a_step_judges_groups_while_the_engine_samples():
    class Task:
        name, verifier, system = "t", "slow", None

        def train(self, index):
            return Problem(index, f"p{index}", index + 1)

    options = BatchOptions(prompts=6, group_size=2)
    source = OnPolicy(Task(), Slow(0.15), SlowEngine(0.08), Prompts(), Ranks(), options, SamplingOptions())
    collected = source.next(1, None)
    assert [r["reward"] for r in collected.records] == [1 / (i + 1) for i in range(6) for _ in range(2)]
    assert len(source.verifier.calls) > 1
    assert collected.seconds["generate"] >= 12 * 0.08
    assert collected.seconds["score"] < 0.45 < len(source.verifier.calls) * 0.15


class Told(Ranks):
    """One of two ranks; the other one says `other`."""

    def __init__(self, other):
        super().__init__(0, 2)
        self.other, self.said = other, []

    def gather(self, value):
        self.said.append(value)
        return [value, self.other]


def test_a_rank_whose_verifier_gave_up_stops_the_others():
    with pytest.raises(VerifierError, match="there"), all_stop(Told("there")):
        pass
    ranks = Told(None)
    with pytest.raises(VerifierError, match="here"), all_stop(ranks):
        raise VerifierError("here")
    assert ranks.said == ["here"]
    with all_stop(Told(None)):
        pass
