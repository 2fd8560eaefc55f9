"""Faults of other trainers in metrics: the right values."""

from __future__ import annotations

import math

import pytest
import torch

import kenpo
from faults.build import batch, plain
from kenpo import metrics
from kenpo import stages as S


def test_clip_fraction_counts_the_clipped_side():
    ratios = [1.5, 1.4, 0.5]
    rollouts, policy = batch([[-1.0]] * 3, [1.0] * 3, old=[[-1.0 - math.log(r)] for r in ratios])
    found = kenpo.evaluate(plain(), rollouts, policy).metrics
    assert found["clip_high"] == pytest.approx(2 / 3)
    assert found["clip_low"] == 0.0


def test_the_average_ratio_is_over_trained_tokens():
    rollouts, policy = batch([[-1.0] * 8], [1.0], masks=[[1, 0, 0, 1, 0, 0, 0, 1]], old=[[-1.0] * 8])
    assert kenpo.evaluate(plain(), rollouts, policy).metrics["ratio"] == pytest.approx(1.0)


def test_ratios_are_reported_before_any_bound():
    rollouts, policy = batch([[-1.0], [-1.0]], [1.0, 1.0], old=[[-1 - math.log(0.5)], [-1 - math.log(9.0)]])
    found = kenpo.evaluate(plain(surrogate=S.DetachedClip(cap=3.0)), rollouts, policy).metrics
    assert found["ratio_max"] == pytest.approx(9.0)
    assert found["ratio"] == pytest.approx(4.75)
    assert found["clip_high"] == pytest.approx(0.5)


def test_sums_and_counts_add_up_over_microbatches():
    old, sampler = [[-1.2], [-1.8] * 3, [-0.9] * 2], [[-1.1], [-2.1] * 3, [-0.5] * 2]
    rollouts, policy = batch([[-1.0], [-2.0] * 3, [-0.5] * 2], [1.0, -1.0, 0.5], old=old, sampler=sampler)
    a = plain()
    b = kenpo.weigh(a, kenpo.prepare(a, rollouts))
    whole = kenpo.objective(a, b, policy)
    parts: metrics.Sums = {}
    for rows in ([0], [1, 2]):
        for name, (s, n) in kenpo.objective(a, b[rows], policy[rows]).sums.items():
            before = parts.get(name, (0.0, 0.0))
            parts[name] = (before[0] + s, before[1] + n)
    assert parts.keys() == whole.sums.keys()
    for name, (s, n) in whole.sums.items():
        assert float(parts[name][0]) == pytest.approx(float(s), abs=1e-12), name
        assert float(parts[name][1]) == pytest.approx(float(n), abs=1e-12), name


def test_a_fully_masked_row_is_no_extreme():
    old, sampler = [[-1.2], [-0.1]], [[-1.2], [-5.0]]
    rollouts, policy = batch([[-1.0], [-9.0]], [1.0, 1.0], masks=[[1], [0]], old=old, sampler=sampler)
    found = kenpo.evaluate(plain(), rollouts, policy).metrics
    assert found["ratio_max"] == pytest.approx(math.exp(0.2))
    assert found["sampler_gap"] == pytest.approx(0.0)


def test_an_average_over_nothing_is_nan_and_harms_no_other():
    rollouts, policy = batch([[-1.0]], [1.0], masks=[[0]])
    found = kenpo.evaluate(plain(), rollouts, policy).metrics
    assert math.isnan(found["ratio"])
    one = (torch.tensor(1.0), torch.tensor(2.0))
    assert metrics.as_floats({"a": one, "b": (torch.tensor(0.0), torch.tensor(0.0))}, {})["a"] == 0.5


def test_saturated_tokens_are_counted():
    rollouts, policy = batch([[-1.0, -1.0]], [1.0], old=[[-1.0, -90.0]])
    assert kenpo.evaluate(plain(), rollouts, policy).metrics["saturated_old"] == 0.5
