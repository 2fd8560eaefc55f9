r"""Reading numbers out of text, exactly (as fractions).

Forms: `42`, `-3.5`, `.5`, `+7`, `1,234,567` (also `1{,}234` and `1\,234`), `3/4`, `3 1/4`, `\frac{3}{4}`,
`3\frac{1}{4}`, `1.5e-3`, `1.5 \times 10^{-3}`, `0.\overline{3}`, each with a Unicode minus if need be. Digits glued to
a letter or an underscore before them (`x2`, `H2O`, `x_1`) are part of a name. A comma is a thousands separator only
before groups of exactly three digits, so `3,14` is two numbers.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from kenpo.experience.units import same_unit, unit_words
from kenpo.experience.wrappers import TEXT_COMMANDS, unwrap

_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "\u00a0": " ", "\u202f": " ", "⁄": "/"})
_WHOLE = r"[+-]?\d[\d,]{0,30}(?:\.\d+)?"
_TIDY = (  # all linear in the text
    (re.compile(r"\{,\}|(?<=\d)\\[,!](?=\d{3})"), ","),
    (re.compile(r"\.{2,}|…"), " "),
    (re.compile(rf"\\[dtc]?frac ?\{{ {{0,3}}({_WHOLE}) {{0,3}}\}} ?\{{ {{0,3}}({_WHOLE}) {{0,3}}\}}"), r" \1/\2 "),
    (re.compile(r"\\[dtc]?frac ?(\d) ?(\d)"), r" \1/\2 "),
    (re.compile(r"(?<=\d) {0,2}(?:\\times|\\cdot|×|\*) {0,2}10 ?\^ ?\{?([+-]?\d{1,3})\}?"), r"e\1"),
)
_TEXT = re.compile(r"\\(?:" + "|".join(TEXT_COMMANDS) + r")\s{0,3}\{([^{}\\]*)\}")
_REPEATING = re.compile(r"(?<![\d.])(\d{1,40})\.(\d{0,40})\\(?:overline|bar|dot)\s{0,3}(?:\{(\d{1,40})\}|(\d))")
_DECIMAL = (
    r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w.]))?|\.\d+(?:[eE][+-]?\d{1,3}(?![\w.]))?"
)
_NUMBER = re.compile(rf"(?<![\w.])(?:(\d+) {{1,2}}(?=\d+/\d))?({_DECIMAL})(?: ?/ ?(-?(?:{_DECIMAL})))?", re.ASCII)
_LONGEST = 400  # characters of one number; a longer run of digits is not read
_WINDOW = 4_000  # characters from the end that are looked at first for the last number

_GLUED_UNIT = re.compile(
    r"cm|mm|km|kg|mg|ml|ft|in|lb|oz|hr|min|sec|mi|yd|mph|kph|deg|usd|eur|gb|mb|kb|hz|khz|mhz|kw|kwh|st|nd|rd|th|k|am|pm",
    re.IGNORECASE,
)
_LETTER_UNITS = set("mgslhJNWVAKCF")
_BEFORE = re.compile(r"[^\d\\^_{}()\[\]+*/<>|]*")
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[*/×·+_=<>!±]|:\s?\d|pi\b|π|sqrt|√|-\s*[\d\\(]|-\s*[A-Za-z]\b|,\s*[\d(+-]|\(\s*[\dA-Za-z]\)?\s*[*+^)]"
    r"|\\(?!%|\$|circ|degree|,|;|!|quad|right| |$)|\^(?!\\circ|\{\\circ\}))"
)
_TRAILER = re.compile(r"(?:\s|\\[,;! ]|\\?[%$]|[°€£¢]|\^\{?\\circ\}?|\^\{?[23]\}?|[A-Za-z.²³'/-]+)*")
_ALTERNATIVE = re.compile(r"[^\d.;,]{0,40}?,?\s?(?:\b(?:or|and|to)\b|&)\s{0,3}[^\d\s]{0,3}\s?\d")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per cent\b|pct\b)", re.IGNORECASE)
_CURRENCY = re.compile(r"([$€£¢])\s?[-+]?\s?$")
_NAME_AND_SIGN = re.compile(r"(?<![A-Za-z])[A-Za-z]\s?[+-]\s?$")
_ANOTHER_NAME = re.compile(r"(.{0,80}?\d[^=]{0,80}?)\s*(?:[,;:]|\band\b|\bat\b)\s*\\?[A-Za-z]\w{0,20}\s*")
_PADDED = re.compile(r"[+-]?0\d+")


class Found(NamedTuple):
    """A number, the text it was read from, the unit stated beside it ("" for none), and whether it is a percentage."""

    value: Fraction
    text: str
    unit: str = ""
    percent: bool = False


def parse_number(value: Any) -> Fraction | None:
    """The number that `value` (a JSON value) is, unit words and currency aside; None if it is not one number."""
    found = read_number(value)
    return found.value if found else None


def read_number(value: Any) -> Found | None:
    """`parse_number` with the unit: what a known answer states. None if it is not one number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Found(Fraction(value), str(value)[:_LONGEST])
    if isinstance(value, float):
        return Found(Fraction(str(value)), str(value)) if math.isfinite(value) else None
    return stated_number(value, whole=True) if isinstance(value, str) else None


def padded_digits(value: Any) -> str | None:
    """`value` unwrapped if it is a string of digits with a leading zero (`01`, `007`), which is text and no number."""
    text = unwrap(value) if isinstance(value, str) and len(value) < _LONGEST else ""
    return text if _PADDED.fullmatch(text) else None


def stated_number(content: str, *, whole: bool = False) -> Found | None:
    r"""The number stated by an explicit answer such as `x = 17 apples`; None if it states something else.

    Of the sides of `2 + 2 = 4` the last one that is a number counts. A number that is part of a larger expression
    (`3\pi`, `3*4`, `(3, 4)`, `2x`), one of two alternatives (`3 or 4`) and one of two equations (`x = 3, y = 4`) is no
    single number. With `whole` nothing but a unit may follow it, and only one name and `=` may precede it.
    """
    text = _tidy(_without_dollars(unwrap(content[:2_000]))).replace("\\$", "$")
    sides = re.split(r"=|\\approx(?![A-Za-z])|≈", unwrap(text))
    if whole and (len(sides) > 2 or not all(re.fullmatch(r"\s*\\?[A-Za-z]\w*\s*", side) for side in sides[:-1])):
        return None  # an equation, not the value of one variable
    if any(re.search(r",\s?[A-Za-z\\]|;|\band\b|\bor\b", side) for side in sides[1:-1]):
        return None
    if len(sides) > 1 and (first := number_beside_equation(text)) is not None:
        return first
    for side in reversed(sides):
        found = _number_in(unwrap(side), whole=whole)
        if found is not None:
            return found
    return None


def number_beside_equation(text: str) -> Found | None:
    """The number of `42 and x = 7` or `42, x = 7`: one that stands before an equation for a name; None elsewhere."""
    left, sign, _ = text.partition("=")
    head = _ANOTHER_NAME.fullmatch(left) if sign else None
    return stated_number(head[1], whole=True) if head else None


def _number_in(text: str, *, whole: bool) -> Found | None:
    match = _NUMBER.search(text)
    if match is None:
        return None
    before, after = text[: match.start()], text[match.end() :]
    if not _BEFORE.fullmatch(_CURRENCY.sub("", before).rstrip("+- ")) or (whole and re.search(r"[A-Za-z]", before)):
        return None
    if (
        _NAME_AND_SIGN.search(before)
        or _OPERATOR_AFTER.match(after)
        or _variable_after(after)
        or _ALTERNATIVE.match(after)
    ):
        return None
    if whole and (not _TRAILER.fullmatch(after) or len(after) > 60):
        return None
    found = _value(text, match)
    if found is None:
        return None
    percent = _PERCENT.match(after) is not None
    currency = _CURRENCY.search(before)
    unit = "" if percent else currency[1] if currency else unit_words(after)
    return found._replace(unit=unit, percent=percent)


def last_number(text: str) -> Found | None:
    """The last number in a text of any length; None if there is none."""
    window = text
    if len(text) > _WINDOW:
        cut = next((i for i in range(len(text) - _WINDOW, len(text)) if text[i].isspace()), -1)
        window = text[cut:] if cut >= 0 else text
    found = _last(_tidy(window))
    return _last(_tidy(text)) if found is None and len(window) < len(text) else found


def same_number(gold: Found, answer: Found) -> bool:
    """Whether an answer is the gold: values as `close` has it, units that don't contradict each other.

    A percentage is both its number and its hundredth where the other side is none: 50% is 50 and 0.5.
    """
    if not same_unit(gold.unit, answer.unit):
        return False
    golds, answers = [gold.value], [answer.value]
    if gold.percent != answer.percent:
        (golds if gold.percent else answers).append((gold if gold.percent else answer).value / 100)
    return any(close(gold=a, answer=b) for a in golds for b in answers)


def close(*, gold: Fraction, answer: Fraction) -> bool:
    """Whether two numbers are equal: exactly if the gold is whole, else within 1e-6 of its size.

    Within 5e-6 of its size where one of the two has no finite decimal form: 1/6 is 0.166667, to six digits. There is
    no absolute tolerance: only 0 is 0.
    """
    if gold == answer or gold.denominator == 1:
        return gold == answer
    share = 1 if _finite(gold) and _finite(answer) else 5
    return abs(gold - answer) * 1_000_000 <= abs(gold) * share


def _finite(value: Fraction) -> bool:
    """Whether the decimals of a fraction end."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def _tidy(text: str) -> str:
    text = text.translate(_SIGNS)
    if "\\" in text:
        text = _REPEATING.sub(_repeating, _TEXT.sub(r" \1 ", text))
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text


def _repeating(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction."""
    whole, fixed, cycle = match[1], match[2], match[3] or match[4]
    value = Fraction(int(whole + fixed + cycle) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return f"{value.numerator}/{value.denominator}"


def _without_dollars(text: str) -> str:
    """`text` without math delimiters and emphasis; a dollar sign that closes nothing is a currency's."""
    text = re.sub(r"\\[()\[\]]|\*\*|__|`", "", text)
    return re.sub(r"(?<!\\)\$", "", text) if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0 else text


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
        if _GLUED_UNIT.fullmatch(word) or word in _LETTER_UNITS:
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
