"""avg@k, maj@k, pass@k and their intervals equal plain counting, on random and on degenerate tables of verdicts."""

import random

import pytest

from kenpo.experience import estimates
from kenpo.experience.estimates import Judged

from . import sampled

ANSWERS = ["4", "5", "6", None]


def tables():
    """Random tables (problem -> samples) and the degenerate ones."""
    draw = random.Random(7)
    for _ in range(60):
        k, chance = draw.choice([1, 2, 3, 5]), draw.random()
        table = []
        for _ in range(draw.randrange(1, 9)):
            answers = [draw.choice(ANSWERS) for _ in range(k)]
            right = draw.choice(ANSWERS[:3])
            table.append([(a == right if chance < 0.7 else draw.random() < chance, a) for a in answers])
        yield table, k
    yield [[(True, "4")] * 4] * 6, 4
    yield [[(False, None)] * 4] * 6, 4
    yield [[(True, "4"), (False, "5")]] * 6, 2
    yield [[(True, "4")]], 1


@pytest.mark.parametrize(("table", "k"), list(tables()))
def test_figures_equal_counting(table, k):
    records = [
        {"index": i, "sample": j, "reward": float(right), "extracted": answer}
        for i, samples in enumerate(table)
        for j, (right, answer) in enumerate(samples)
    ]
    random.Random(1).shuffle(records)
    groups = estimates.by_problem(records, len(table), 1.0)
    assert groups == [[Judged(*s) for s in samples] for samples in table]
    flags = [[right for right, _ in samples] for samples in table]
    same(estimates.average_at(groups, k), [sampled.share(f) for f in flags], k)
    for n in range(1, k + 1):
        same(estimates.pass_at(groups, n, k), [sampled.passes(f, n) for f in flags], k)
        if any(answer is not None for samples in table for _, answer in samples):
            same(estimates.majority_at(groups, n), [sampled.vote(samples[:n]) for samples in table], 1)
        else:
            assert estimates.majority_at(groups, n) is None


def same(found, values, samples):
    assert found.problems == len(values)
    assert found[:3] == pytest.approx(sampled.interval(values, samples), abs=1e-12)
    assert 0 <= found.low <= found.mean + 1e-15
    assert found.mean - 1e-15 <= found.high <= 1
    assert found.high > found.low


def test_samples_without_verdict_count_nowhere():
    records = [
        {"index": 0, "sample": 0, "reward": None, "extracted": "4"},
        {"index": 0, "sample": 1, "reward": 1.0, "extracted": "4"},
        {"index": 1, "sample": 0, "reward": None, "extracted": None},
        {"index": 1, "sample": 1, "reward": None, "extracted": None},
    ]
    groups = estimates.by_problem(records, 2, 1.0)
    assert [len(g) for g in groups] == [1, 0]
    assert estimates.average_at(groups, 2)[3] == 1
    assert estimates.pass_at(groups, 2, 2) is None
    assert estimates.majority_at(groups, 2) is None
    assert estimates.estimate([]) is None


def test_a_known_interval():
    """Wilson's interval of 8 of 10, as tables print it: 0.4902 to 0.9433."""
    found = estimates.estimate([1.0] * 8 + [0.0] * 2)
    assert (round(found.low, 4), round(found.high, 4)) == (0.4902, 0.9433)
