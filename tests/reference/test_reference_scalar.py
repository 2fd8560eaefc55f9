"""The tape's slopes agree with central differences."""

from __future__ import annotations

import math
import random

import pytest

from reference import scalar as s
from reference.scalar import Value, gradients, stop

FUNCTIONS = {
    "sum": lambda a, b: a + b + 2.0 - a * 0.5,
    "difference": lambda a, b: 1.0 - a - (b - 3.0),
    "product": lambda a, b: a * b * b,
    "quotient": lambda a, b: (a + 1.0) / (b * b + 2.0) + 3.0 / (a * a + 1.0) - b / 4.0,
    "exp and log": lambda a, b: s.log(s.exp(a) + s.exp(b)),
    "expm1 and log1p": lambda a, b: s.log1p(s.expm1(0.3 * a) * 0.2 + b * b),
    "sqrt": lambda a, b: s.sqrt(a * a + b * b + 1.0),
    "sigmoid": lambda a, b: s.sigmoid(a * 3.0) * s.sigmoid(-b),
    "softplus": lambda a, b: s.softplus(a - 2.0 * b),
    "minimum": lambda a, b: s.minimum(a * 2.0, b * b),
    "maximum": lambda a, b: s.maximum(a * 2.0, b * b),
    "clamp": lambda a, b: s.clamp(a, -0.5, 0.5) * b,
    "shared": lambda a, b: (a * b) * (a * b) + a,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_agree_with_differences(name):
    f, rng = FUNCTIONS[name], random.Random(name)
    for _ in range(20):
        x = [rng.uniform(-2, 2), rng.uniform(-2, 2)]
        leaves = [Value(v) for v in x]
        y = f(*leaves)
        assert math.isclose(stop(y), stop(f(*x)), rel_tol=1e-15)
        for k, slope in enumerate(gradients(y, leaves)):
            h = 1e-6
            up, down = [v + h * (j == k) for j, v in enumerate(x)], [v - h * (j == k) for j, v in enumerate(x)]
            assert math.isclose(slope, (f(*up) - f(*down)) / (2 * h), rel_tol=1e-6, abs_tol=1e-8)


def test_beyond_a_bound_there_is_no_slope():
    a = Value(3.0)
    assert s.clamp(a, -1.0, 1.0) == 1.0
    assert gradients(s.clamp(a, -1.0, 3.0) * 2.0, [a]) == [2.0]  # on the bound it is still the number itself


def test_stopped_numbers_have_no_history():
    a = Value(2.0)
    assert gradients(a * stop(a), [a]) == [2.0]


def test_extremes_stay_finite():
    for v in (-800.0, 800.0, 1e9, -1e9):
        a = Value(v)
        for f in (s.sigmoid, s.softplus):
            assert math.isfinite(stop(f(a)))
            assert math.isfinite(gradients(f(a), [a])[0])


def test_a_long_sum_needs_no_deep_stack():
    a = Value(1.0)
    total = 0.0
    for _ in range(20000):
        total = total + a
    assert gradients(total, [a]) == [20000.0]
