r"""Reading numbers out of text, exactly (as fractions).

Forms: `42`, `-3.5`, `.5`, `+7`, `1,234,567` (also `1{,}234` and `1\,234`), `3/4`, `3 1/4`, `\frac{3}{4}`,
`3\frac{1}{4}`, `1.5e-3`, `1.5 \times 10^{-3}`, each with a Unicode minus if need be. Currency signs, percent signs,
degree signs and unit words beside a number are passed over: `50%` is 50. Digits glued to a letter or an underscore
before them (`x2`, `H2O`, `x_1`) are part of a name. A comma is a thousands separator only before groups of exactly
three digits, so `3,14` is two numbers.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "\u00a0": " ", "\u202f": " ", "⁄": "/"})
_TIDY = (  # all linear in the text
    (re.compile(r"\{,\}|(?<=\d)\\[,!](?=\d{3})"), ","),
    (re.compile(r"\.{2,}|…"), " "),
    (re.compile(r"\\[dtc]?frac ?\{ {0,3}([+-]?\d+) {0,3}\} ?\{ {0,3}([+-]?\d+) {0,3}\}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac ?(\d) ?(\d)"), r" \1/\2 "),
    (re.compile(r"(?<=\d) {0,2}(?:\\times|\\cdot|×|\*) {0,2}10 ?\^ ?\{?([+-]?\d{1,3})\}?"), r"e\1"),
)
_DECIMAL = (
    r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w.]))?|\.\d+(?:[eE][+-]?\d{1,3}(?![\w.]))?"
)
_NUMBER = re.compile(rf"(?<![\w.])(?:(\d+) {{1,2}}(?=\d+/\d))?({_DECIMAL})(?: ?/ ?(-?(?:{_DECIMAL})))?", re.ASCII)
_LONGEST = 400  # characters of one number; a longer run of digits is not read
_WINDOW = 4_000  # characters from the end that are looked at first for the last number

_UNITS = frozenset(
    (
        "cm",
        "mm",
        "km",
        "kg",
        "mg",
        "ml",
        "ft",
        "in",
        "lb",
        "oz",
        "hr",
        "min",
        "sec",
        "mi",
        "yd",
        "mph",
        "kph",
        "deg",
        "usd",
        "eur",
        "gb",
        "mb",
        "kb",
        "hz",
        "khz",
        "mhz",
        "kw",
        "kwh",
    )
)
_LETTER_UNITS = set("mgslhJNWVAKCF")
_BEFORE = re.compile(r"[^\d\\^_{}()\[\]+*/<>|]*")
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[*/×·+_=<>!]|pi\b|π|sqrt|√|-\s*[\d\\(]|-\s*[A-Za-z]\b|,\s*[\d(+-]|\(\s*[\dA-Za-z]\)?\s*[*+^)]"
    r"|\\(?!%|text|mathrm|mbox|circ|degree|,|;|!|quad| |$)|\^(?!\\circ|\{\\circ\}))"
)
_TRAILER = re.compile(r"(?:\s|\\[,;! ]|\\?%|°|\^\{?\\circ\}?|\\(?:text|mathrm|mbox)\{[^{}]*\}|[A-Za-z.²³'/-]+)*")


class Found(NamedTuple):
    """A number and the text it was read from."""

    value: Fraction
    text: str


def parse_number(value: Any) -> Fraction | None:
    """The number that `value` (a JSON value) is, unit words and currency aside; None if it is not one number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(str(value)) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    found = stated_number(value, whole=True)
    return found.value if found else None


def stated_number(content: str, *, whole: bool = False) -> Found | None:
    r"""The number stated by an explicit answer such as `x = 17 apples`; None if it states something else.

    After the last `=` the first number counts, unless it is part of a larger expression (`3\pi`, `3*4`, `(3, 4)`,
    `2x`). With `whole` nothing but units may follow it.
    """
    text = _tidy(_without_math(content[:2_000]))
    left, _, text = text.rpartition("=")
    text = text.strip()
    if whole and left and not re.fullmatch(r"\s*\\?[A-Za-z]\w*\s*", left):
        return None  # an equation, not the value of one variable
    match = _NUMBER.search(text)
    if match is None:
        return None
    before, after = text[: match.start()], text[match.end() :]
    if not _BEFORE.fullmatch(before.rstrip("+- ")) or (whole and re.search(r"[A-Za-z]", before)):
        return None
    if _OPERATOR_AFTER.match(after) or _variable_after(after):
        return None
    if whole and (not _TRAILER.fullmatch(after) or len(after) > 60):
        return None
    return _value(text, match)


def last_number(text: str) -> Found | None:
    """The last number in a text of any length; None if there is none."""
    window = text
    if len(text) > _WINDOW:
        cut = next((i for i in range(len(text) - _WINDOW, len(text)) if text[i].isspace()), -1)
        window = text[cut:] if cut >= 0 else text
    found = _last(_tidy(window))
    return _last(_tidy(text)) if found is None and len(window) < len(text) else found


def close(*, gold: Fraction, answer: Fraction) -> bool:
    """Whether an answer is the gold: exactly if the gold is whole, else within 1e-6 of its size (`0.333333`)."""
    return gold == answer if gold.denominator == 1 else abs(gold - answer) <= abs(gold) / 1_000_000


def _tidy(text: str) -> str:
    text = text.translate(_SIGNS)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text


def _without_math(text: str) -> str:
    return re.sub(r"\\?\$|\\[()\[\]]|\*\*|__|`", "", text)


def _last(text: str) -> Found | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return _value(text, last) if last is not None else None


def _value(text: str, match: re.Match[str]) -> Found | None:
    whole, first, second = match.groups()
    if match.end() - match.start() > _LONGEST:
        return None
    value = _decimal(first)
    start = match.start()
    if second is not None:
        divisor = _decimal(second)
        if divisor == 0:
            return None
        value /= divisor
        if whole is not None and not value < 1:  # "12 24/2" is not a mixed number
            whole, start = None, match.start(2)
    if whole is not None:
        value += int(whole)
    negative, start = _sign(text, start)
    return Found(-value if negative else value, " ".join(text[start : match.end()].split()))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _sign(text: str, start: int) -> tuple[bool, int]:
    """Whether the number at `start` is negative, and where it begins with its sign: `10-3` and `10 - 3` end in 3."""
    i = start
    while i > 0 and text[i - 1] in "$€£ ":
        i -= 1
    if i == 0 or text[i - 1] not in "+-":
        return False, start
    sign, gap = i - 1, start - i
    before = text[max(0, sign - 3) : sign]
    glued = before[-1:].isalnum() or before[-1:] in tuple(")]}%.")
    spaced = gap > 0 and (before.rstrip()[-1:].isdigit() or before.rstrip()[-1:] in tuple(")]}"))
    if glued or spaced:
        return False, start
    return text[sign] == "-", sign


def _variable_after(after: str) -> bool:
    """Whether letters that follow make the number a coefficient: `2x`, `3ab`, but not `5cm`, `5 m` or `10th`."""
    glued = re.match(r"[A-Za-z]+", after)
    if glued:
        word = glued[0]
        if word.lower() in _UNITS | {"st", "nd", "rd", "th", "k", "am", "pm"} or (word in _LETTER_UNITS):
            return False
        return len(word) < 4
    spaced = re.match(r" ([A-Za-z])(?![\w.'])", after)
    return spaced is not None and spaced[1] not in _LETTER_UNITS | {"a", "I"}


# ------------------------------------------------------------------------------------------------------------ prose

_MARKUP = re.compile(r"\\(?:begin|end)\s*\{[a-z*]+\}|\\(?:text|mathrm|mbox|textrm|textbf|mathbf)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTIONS = frozenset(("sqrt", "infinity", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"))
_STOP_WORDS = frozenset((
    "all", "an", "any", "are", "be", "but", "can", "for", "get", "has", "he", "if", "in", "is", "it", "no", "not",
    "of", "see", "she", "so", "the", "to", "was", "we", "yes", "you",
))  # fmt: skip


def is_prose(text: str) -> bool:
    r"""Whether a text holds a word of prose: over three letters and no function, or a common short word.

    `xy + abc`, `\sin x` and `5\text{ apples}` hold none.
    """
    words = [word.lower() for word in _WORD.findall(_MARKUP.sub(" ", text))]
    return any(word in _STOP_WORDS or (len(word) > 3 and word not in _FUNCTIONS) for word in words)
