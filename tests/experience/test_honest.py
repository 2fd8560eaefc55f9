"""An honest answer earns 1 and another value in the same style earns 0, whatever the style."""

from __future__ import annotations

import math
from collections import defaultdict

import honest
import pytest

from kenpo.experience.verifiers import Sample, load_verifier

pytest.importorskip("math_verify")


def judged(count, seed):
    """(wrong verdicts, abstentions) of `count` pairs, each pair with both of its completions."""
    by_verifier = defaultdict(list)
    for pair in honest.pairs(count, seed):
        by_verifier[pair.verifier].append(pair)
    wrong, abstained = [], []
    for name, found in by_verifier.items():
        with load_verifier(name, time_limit=30.0) as verifier:
            right = verifier.score([Sample(completion=pair.right, answer=pair.gold) for pair in found])
            other = verifier.score([Sample(completion=pair.wrong, answer=pair.gold) for pair in found])
        for pair, good, bad in zip(found, right, other, strict=True):
            if math.isnan(good.reward) or math.isnan(bad.reward):
                abstained.append((pair, good, bad))
            elif (good.reward, bad.reward) != (1.0, 0.0):
                wrong.append((pair, good, bad))
    return wrong, abstained


def check(count, seed):
    wrong, abstained = judged(count, seed)
    assert wrong == []
    assert len(abstained) < count / 100, abstained[:10]


def test_two_thousand_pairs():
    check(2_000, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_pairs():
    check(100_000, seed=1)


def test_the_pairs_cover_every_kind_and_style():
    drawn = list(honest.pairs(2_000, seed=0))
    assert {pair.kind for pair in drawn} == set(honest.KINDS)
    assert {pair.style for pair in drawn} == set(honest.STYLES)
    assert len(honest.STYLES) >= 20
    assert all(pair.right != pair.wrong for pair in drawn)
