"""Honest solvers: random known answers, and completions that state a value in one of many styles.

`pairs(count, seed)` gives (kind, verifier, gold, right, wrong): the known answer, a completion that states it, and
one in the same style that states another value. What is right or wrong is known from how the values were drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

Say = Callable[[str, str], str]  # (the value, another value) -> a completion

STYLES: dict[str, Say] = {
    "box": lambda v, d: rf"So we get $\boxed{{{v}}}$.",
    "displaystyle": lambda v, d: rf"\boxed{{\displaystyle {v}}}",
    "fbox": lambda v, d: rf"Hence \fbox{{${v}$}}",
    "sentence": lambda v, d: f"First, 3 steps. The answer is ${v}$.",
    "colon": lambda v, d: f"Some work.\n\nAnswer: {v}",
    "hashes": lambda v, d: f"2 + 2 = 4, and so on.\n#### {v}",
    "tag": lambda v, d: f"<answer>{v}</answer>",
    "tag with a sentence": lambda v, d: f"<answer>The answer is {v}</answer>",
    "tag that a stop string cut": lambda v, d: f"It follows. <answer>{v}",
    "bold": lambda v, d: f"**Answer:** {v}",
    "bold value": lambda v, d: f"Thus, the answer to the problem is **{v}**.",
    "display math": lambda v, d: f"The answer is:\n\\[\n{v}\n\\]",
    "dollars on lines": lambda v, d: f"**Final Answer**\n$$\n{v}\n$$",
    "fence": lambda v, d: f"Answer:\n```\n{v}\n```",
    "heading": lambda v, d: f"## Final Answer\n\n{v}",
    "remark after a box": lambda v, d: f"\\boxed{{{v}}}\n\nI checked that the answer is right.",
    "remark after a phrase": lambda v, d: f"Answer: {v}\nThis answer is correct; see step 3.",
    "remark after a tag": lambda v, d: f"<answer>{v}</answer>\nThe answer is final.",
    "where": lambda v, d: f"The answer is {v}, where x = 7.",
    "when": lambda v, d: f"The final answer is {v} when n = 5.",
    "aside": lambda v, d: f"The answer is {v} (for k = 3).",
    "contrast": lambda v, d: f"The answer is {v}, not {d}.",
    "mended": lambda v, d: f"At first \\boxed{{{d}}}. That is wrong: \\boxed{{{v}}}.",
    "said again": lambda v, d: f"The answer is {d}. Wait, a slip. The answer is {v}.",
    "thought": lambda v, d: f"<think>Perhaps \\boxed{{{d}}}, or the answer is {d}?</think>\nThe answer is {v}.",
    "condition": lambda v, d: f"The answer is {v}. If the answer is {d}, the sum is too large.",
}


class Value(NamedTuple):
    """A value by one of its spellings for the data, and those that a solver may write."""

    gold: str
    said: tuple[str, ...]


Draw = Callable[[random.Random], tuple[Value, Value]]


def number(draw: random.Random) -> tuple[Value, Value]:
    x = draw.choice((draw.randint(-20, 120), draw.randint(1_000, 3_000_000), Fraction(draw.randint(-999, 9_999), 100)))
    step = draw.choice((1, -1, 10, Fraction(1, 10), 1000))
    y = draw.choice((x + step, x - step, -x, x * 10, Fraction(x) / 10))
    return _number(Fraction(x)), _number(Fraction(y if y != x else x + 1))


def _number(x: Fraction) -> Value:
    plain = _decimal(x)
    whole = x.denominator == 1
    said = [plain, plain + ".0" if whole else plain + "0", rf"{plain}"]
    if whole:
        said += [f"{x.numerator:,}", f"{x.numerator:,}".replace(",", "{,}")]
    return Value(plain, tuple(said))


def _decimal(x: Fraction) -> str:
    sign, scaled = "-" if x < 0 else "", abs(x)
    digits = 0
    while scaled.denominator != 1:
        scaled, digits = scaled * 10, digits + 1
    text = str(scaled.numerator).rjust(digits + 1, "0")
    return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


def fraction(draw: random.Random) -> tuple[Value, Value]:
    def spelled(x: Fraction) -> Value:
        sign, p, q = "-" if x < 0 else "", abs(x.numerator), x.denominator
        said = [f"{sign}{p}/{q}", rf"{sign}\frac{{{p}}}{{{q}}}", rf"{sign}\dfrac{{{2 * p}}}{{{2 * q}}}"]
        if p > q > 1:
            said.append(rf"{sign}{p // q}\frac{{{p % q}}}{{{q}}}")
        return Value(draw.choice(said[:2]), tuple(said))

    x = Fraction(draw.choice((-1, 1)) * draw.randint(1, 60), draw.randint(2, 40))
    y = draw.choice((-x, 1 / x, x + Fraction(1, x.denominator), Fraction(x.numerator, x.denominator + 1)))
    return spelled(x), spelled(y if y != x else x + 1)


def power(draw: random.Random) -> tuple[Value, Value]:
    def spelled(base: int, exponent: int) -> Value:
        latex = f"{base}^{{{exponent}}}"
        return Value(latex, (latex, f"{base}**{exponent}", f"{base}^({exponent})"))

    base, exponent = draw.choice((2, 3, 5, 7, 10)), draw.choice((-1, 1)) * draw.randint(2, 60)
    other = draw.choice(((base, exponent + 1), (base, -exponent), (base + 1, exponent)))
    return spelled(base, exponent), spelled(*other)


def root(draw: random.Random) -> tuple[Value, Value]:
    def spelled(index: int, radicand: int) -> Value:
        if index == 2:
            return Value(rf"\sqrt{{{radicand}}}", (rf"\sqrt{{{radicand}}}", f"sqrt({radicand})", f"{radicand}^{{1/2}}"))
        latex = rf"\sqrt[{index}]{{{radicand}}}"
        return Value(
            latex, (latex, rf"\sqrt[{index}]{radicand}" if radicand < 10 else latex, f"{radicand}^{{1/{index}}}")
        )

    index, radicand = draw.choice((2, 3, 5)), draw.choice((2, 3, 5, 6, 7, 10, 11))
    return spelled(index, radicand), spelled(*draw.choice(((index, radicand + 2), (index + 1, radicand))))


def finite_set(draw: random.Random) -> tuple[Value, Value]:
    def spelled(items: list[int]) -> Value:
        def shuffled() -> str:
            return ", ".join(map(str, draw.sample(items, len(items))))

        return Value(
            rf"\{{{shuffled()}\}}", (rf"\{{{shuffled()}\}}", rf"\left\{{{shuffled()}\right\}}", f"{{{shuffled()}}}")
        )

    items = draw.sample(range(-9, 30), draw.randint(2, 4))
    first = -items[0] if items[0] else 41
    other = draw.choice(([*items[:-1], items[-1] + 31], [*items, 40], [first, *items[1:]]))
    other = other if set(other) != set(items) and len(set(other)) == len(other) else [50, *items[1:]]
    return spelled(items), spelled(other)


def listed(draw: random.Random) -> tuple[Value, Value]:
    def spelled(items: list[int]) -> Value:
        head, last = ", ".join(map(str, items[:-1])), items[-1]
        golds = (f"{head}, {last}", rf"{head}, \text{{ and }} {last}", f"{head} or {last}", f"{head}, and {last}")
        return Value(draw.choice(golds), (f"{head}, {last}", f"{head} and {last}", rf"{head}\text{{ or }}{last}"))

    items = sorted(draw.sample(range(-9, 30), draw.randint(2, 4)))
    return spelled(items), spelled([*items[:-1], items[-1] + draw.randint(1, 5)])


def interval(draw: random.Random) -> tuple[Value, Value]:
    def spelled(left: str, low: int, high: int, right: str) -> Value:
        plain = f"{left}{low}, {high}{right}"
        return Value(plain, (plain, f"{left}{low},{high}{right}", rf"\left{left}{low}, {high}\right{right}"))

    left, right = draw.choice("(["), draw.choice(")]")
    low = draw.randint(-9, 9)
    high = low + draw.randint(1, 9)
    wrong = draw.choice((("[" if left == "(" else "(", low, high, right), (left, low, high + 1, right)))
    return spelled(left, low, high, right), spelled(*wrong)


def choice(draw: random.Random) -> tuple[Value, Value]:
    def spelled(letter: str) -> Value:
        name = {"A": "Rome", "B": "Paris", "C": "Lima", "D": "Oslo", "E": "Cairo"}[letter]
        return Value(draw.choice((letter, f"({letter})")), (letter, f"({letter})", f"{letter})", f"({letter}) {name}"))

    a, b = draw.sample("ABCDE", 2)
    return spelled(a), spelled(b)


WORDS = (
    "Paris", "New York", "the Eiffel Tower", "H2O", "St. Louis", "J. K. Rowling", "red", "photosynthesis", "Apollo 11",
    "Yes", "no", "north-west", "Müller", "x-ray", "World War II", "carbon dioxide", "Wednesday", "3rd base",
)  # fmt: skip


def text(draw: random.Random) -> tuple[Value, Value]:
    a, b = draw.sample(WORDS, 2)
    return Value(a, (a, rf"\text{{{a}}}", f'"{a}"')), Value(b, (b, rf"\text{{{b}}}", f'"{b}"'))


# kind -> how values are drawn, which verifiers judge them, how often in 100 (formulas are slow to parse)
KINDS: dict[str, tuple[Draw, tuple[str, ...], int]] = {
    "number": (number, ("numeric", "gsm8k", "math_verify"), 32),
    "fraction": (fraction, ("numeric", "math_verify"), 20),
    "choice": (choice, ("exact", "math_verify"), 16),
    "text": (text, ("exact",), 24),
    "power": (power, ("math_verify",), 2),
    "root": (root, ("math_verify",), 1),
    "set": (finite_set, ("math_verify",), 1),
    "list": (listed, ("math_verify",), 2),
    "interval": (interval, ("math_verify",), 2),
}


class Pair(NamedTuple):
    """A known answer, a completion that states it, one that states another value, and where they come from."""

    kind: str
    style: str
    verifier: str
    gold: str
    right: str
    wrong: str


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """`count` pairs; the same ones for the same seed."""
    draw = random.Random(seed)
    names, weights = list(KINDS), [weight for _, _, weight in KINDS.values()]
    for _ in range(count):
        kind = draw.choices(names, weights)[0]
        make, verifiers, _ = KINDS[kind]
        value, other = make(draw)
        style = draw.choice(list(STYLES))
        place = draw.randrange(len(value.said))
        a, b = (side.said[place % len(side.said)] for side in (value, other))
        gold = value.gold if kind != "number" or draw.random() < 0.8 else f"It adds up.\n#### {value.gold}"
        yield Pair(kind, style, draw.choice(verifiers), gold, STYLES[style](a, b), STYLES[style](b, a))
