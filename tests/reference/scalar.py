"""Reverse-mode differentiation of plain Python numbers, so that a formula written in loops also gives its gradient.

`Value` records what it was computed from; `gradients(loss, inputs)` walks back once. The functions below take floats
as well, so the same formula can be evaluated with or without a tape. `stop(x)` is the papers' stop-gradient sg[x].
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class Value:
    """A number with the numbers it came from: `parents` holds (parent, d self / d parent)."""

    __slots__ = ("data", "grad", "parents")

    def __init__(self, data: float, parents: Iterable[tuple[Value, float]] = ()):
        self.data = float(data)
        self.parents = tuple(parents)
        self.grad = 0.0

    def __repr__(self) -> str:
        return f"Value({self.data!r})"

    def __add__(self, other):
        if isinstance(other, Value):
            return Value(self.data + other.data, [(self, 1.0), (other, 1.0)])
        return Value(self.data + other, [(self, 1.0)])

    def __mul__(self, other):
        if isinstance(other, Value):
            return Value(self.data * other.data, [(self, other.data), (other, self.data)])
        return Value(self.data * other, [(self, float(other))])

    def __neg__(self):
        return Value(-self.data, [(self, -1.0)])

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return (-self) + other

    def __truediv__(self, other):
        if isinstance(other, Value):
            ratio = self.data / other.data
            return Value(ratio, [(self, 1.0 / other.data), (other, -ratio / other.data)])
        return Value(self.data / other, [(self, 1.0 / other)])

    def __rtruediv__(self, other):
        ratio = other / self.data
        return Value(ratio, [(self, -ratio / self.data)])

    __radd__ = __add__
    __rmul__ = __mul__


def stop(x) -> float:
    """sg[x]: the number without its history."""
    return x.data if isinstance(x, Value) else x


def _apply(x, value: float, slope: float):
    return Value(value, [(x, slope)]) if isinstance(x, Value) else value


def exp(x):
    """e^x."""
    y = math.exp(stop(x))
    return _apply(x, y, y)


def log(x):
    """Natural logarithm."""
    v = stop(x)
    return _apply(x, math.log(v), 1.0 / v)


def expm1(x):
    """e^x - 1, exact near 0."""
    v = stop(x)
    return _apply(x, math.expm1(v), math.exp(v))


def log1p(x):
    """log(1 + x), exact near 0."""
    v = stop(x)
    return _apply(x, math.log1p(v), 1.0 / (1.0 + v))


def sqrt(x):
    """Square root."""
    y = math.sqrt(stop(x))
    return _apply(x, y, 0.5 / y)


def sigmoid(x):
    """1 / (1 + e^-x) without overflow."""
    v = stop(x)
    y = 1.0 / (1.0 + math.exp(-v)) if v >= 0 else math.exp(v) / (1.0 + math.exp(v))
    return _apply(x, y, y * (1.0 - y))


def softplus(x):
    """log(1 + e^x) without overflow; its slope is the sigmoid."""
    v = stop(x)
    y = max(v, 0.0) + math.log1p(math.exp(-abs(v)))
    return _apply(x, y, stop(sigmoid(v)))


def minimum(a, b):
    """The smaller of two numbers; on a tie the first."""
    return a if stop(a) <= stop(b) else b


def maximum(a, b):
    """The larger of two numbers; on a tie the first."""
    return a if stop(a) >= stop(b) else b


def clamp(x, low: float, high: float):
    """x held in [low, high]. Beyond a bound it is the bound, without gradient; on the bound it is still x."""
    if stop(x) < stop(low):
        return low
    return high if stop(x) > stop(high) else x


def gradients(loss, inputs: Iterable[Value]) -> list[float]:
    """d loss / d input for each of `inputs` (0 for those the loss doesn't depend on; all 0 for a plain number)."""
    inputs = list(inputs)
    order = _topological(loss) if isinstance(loss, Value) else []
    for node in [*order, *inputs]:
        node.grad = 0.0
    if order:
        loss.grad = 1.0
    for node in reversed(order):
        for parent, slope in node.parents:
            parent.grad += node.grad * slope
    return [x.grad for x in inputs]


def _topological(root: Value) -> list[Value]:
    """Every value the root came from, each after its parents (no recursion: sums make deep tapes)."""
    order: list[Value] = []
    seen: set[int] = set()
    stack: list[tuple[Value, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.parents)
    return order
