r"""Equality of two written mathematical answers, by math_verify, with its known faults mended or answered "abstain".

Runs in a worker process and imports nothing of Kenpo but `numerals.py` beside it. What is done around math_verify:

- each side is one formula, so none is reduced to the last number it holds: `2x+5y-1=0` and `x-y+4=0` differ;
- plain text is written as LaTeX first: `3*pi/2`, `sqrt(2)/2`, `x**2`, `3 1/4`, `x <= 3`, `{1, 2}`, `5 or -5`;
- units are split off and compared: `1 m` equals `100 cm`, `5 m` is not `5 s`; one missing or unknown unit is ignored;
- two expressions also count as equal if they agree wherever both are real: `\sqrt{1/m}` and `1/\sqrt{m}`
  (so m > 0 is assumed), but not |x| and x;
- a one-word answer (`Yes`, `\text{even}`) is compared as text.

Kept from math_verify: gold first; a gold interval accepts no inequality as its answer, a gold inequality accepts the
interval; `50\%` equals both 0.5 and 50; a value given as `x = 5` equals 5; floats agree to 6 digits.

A gold that can't be read abstains for every answer. An answer in prose is wrong (0); one that looks like a formula
but can't be read or compared abstains.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

_UNREAD = object()


class Side(NamedTuple):
    """One side of the comparison: its LaTeX without the unit, and the unit ("" for none)."""

    latex: str
    unit: str


def warm_up() -> None:
    """Import math_verify and parse once, so that the first sample's time limit is its own."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parse(r"\frac{1}{2}")


def compare(*, gold: str, answer: str | None) -> dict[str, Any]:
    """A verdict as plain data. `answer` None: none was found, which is 0 unless the gold can't be read."""
    gold, answer = _letter(gold), answer if answer is None else _letter(answer)
    word = _word(gold)
    if word is not None:
        return _ok(answer is not None and _word(answer) == word)
    wanted = _side(gold)
    target = _UNREAD if wanted is None else _parse(wanted.latex)
    if wanted is None or target is _UNREAD:
        return {"status": "abstain", "detail": f"the known answer {gold[:60]!r} can't be read as mathematics"}
    if answer is None:
        return {**_ok(False), "detail": "no answer found"}
    given = _side(answer)
    if given is None:
        return {**_ok(False), "detail": "the answer is not a formula"}
    verdict = _by_numbers(gold, answer, wanted, given)
    if verdict is not None:
        return _ok(verdict)
    given = _same_unit_letters(wanted, given)
    parsed = _parse(given.latex)
    if parsed is _UNREAD:
        return {"status": "abstain", "detail": f"the answer {answer[:60]!r} can't be read as mathematics"}
    if not _units_agree(wanted.unit, given.unit):
        return _ok(False)
    return _by_math_verify(target, parsed)


def _letter(text: str) -> str:
    """`(A)` and `\\text{(A)}`, the choice of a test, as `A`."""
    choice = re.fullmatch(r"\s*(?:\\(?:text|mathrm|mbox|textbf)\s*\{)?\s*\(?([A-Za-z])\)?\s*\}?\s*", text)
    return choice[1] if choice else text


def _ok(right: bool) -> dict[str, Any]:
    return {"status": "ok", "reward": float(right)}


def _by_math_verify(gold: Any, answer: Any) -> dict[str, Any]:
    import math_verify

    try:
        equal = math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        return {"status": "abstain", "detail": f"math_verify can't compare the two ({type(error).__name__}: {text})"}
    return _ok(bool(equal) or _equal_where_real(gold, answer))


def _parse(latex: str) -> Any:
    """A SymPy object, or _UNREAD."""
    import math_verify

    config = [math_verify.LatexExtractionConfig(boxed_match_priority=-1)]
    try:
        found = math_verify.parse(f"${latex}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    except (Exception, RecursionError):
        return _UNREAD
    return found[0] if found and not isinstance(found[0], str) else _UNREAD


def _equal_where_real(gold: Any, answer: Any) -> bool:
    """Whether two expressions in the same symbols agree at random points, wherever both are real."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    symbols = sorted(gold.free_symbols, key=str)
    if not symbols or gold.free_symbols != answer.free_symbols or gold.has(sympy.Float) or answer.has(sympy.Float):
        return False
    draw, agreed = random.Random(0), 0
    for trial in range(24):
        low = 1 if trial % 3 == 0 else -300  # some points with all symbols positive
        point = {symbol: sympy.Rational(draw.randint(low, 300), 97) for symbol in symbols}
        try:
            a, b = (sympy.N(side.subs(point), 30) for side in (gold, answer))
        except Exception:
            return False
        if a.is_real and b.is_real and a.is_finite and b.is_finite:
            if abs(a - b) > 1e-20 * max(1, abs(a)):
                return False
            agreed += 1
    return agreed >= 4


# ------------------------------------------------------------------------------------------------ numbers and units


def _numbers() -> Any:
    global _number_module
    if _number_module is None:
        import sys

        spec = importlib.util.spec_from_file_location("kenpo_numerals", Path(__file__).with_name("numerals.py"))
        assert spec is not None
        assert spec.loader is not None
        _number_module = importlib.util.module_from_spec(spec)
        sys.modules["kenpo_numerals"] = _number_module
        spec.loader.exec_module(_number_module)
    return _number_module


_number_module: Any = None


def _by_numbers(gold: str, answer: str, wanted: Side, given: Side) -> bool | None:
    """The verdict where both sides are plain numbers; None where one is not (percentages are left to math_verify)."""
    if "%" in gold or "%" in answer:
        return None
    numbers = _numbers()
    a, b = numbers.parse_number(wanted.latex), numbers.parse_number(given.latex)
    if a is None or b is None:
        return None
    known = _UNITS.get(wanted.unit), _UNITS.get(given.unit)
    if known[0] is not None and known[1] is not None:
        if known[0][0] != known[1][0]:
            return False
        a, b = a * numbers.Fraction(known[0][1]), b * numbers.Fraction(known[1][1])
    if a.denominator > 1 and abs(a) < 1 and abs(a - b) <= numbers.Fraction(1, 10**6) and "." in given.latex:
        return True  # 0.333333 for 1/3
    return bool(numbers.close(gold=a, answer=b))


def _units_agree(gold: str, answer: str) -> bool:
    if gold in _UNITS and answer in _UNITS:
        return _UNITS[gold] == _UNITS[answer]
    return True


_LENGTH = {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000"}
_IMPERIAL = {"in": "1", "inch": "1", "ft": "12", "foot": "12", "feet": "12", "yd": "36", "yard": "36", "mile": "63360"}
_MASS = {"mg": "1/1000", "g": "1", "gram": "1", "kg": "1000", "kilogram": "1000"}
_TIME = {"s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hour": "3600", "day": "86400"}
_MONEY = {"cent": "1/100", "dollar": "1", "usd": "1"}
_ANGLE = {"degree": "1", "deg": "1", "°": "1"}
_NAMES = {"millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km"}
_UNITS: dict[str, tuple[str, str]] = {
    unit: (dimension, factor)
    for dimension, table in (
        ("length", _LENGTH), ("imperial", _IMPERIAL), ("mass", _MASS), ("time", _TIME), ("money", _MONEY),
        ("angle", _ANGLE),
    )
    for unit, factor in table.items()
}  # fmt: skip
for _long, _short in _NAMES.items():
    _UNITS[_long] = _UNITS[_short]
_LATEX_UNIT = re.compile(
    r"(?:\\[,;! ]|~|\s)*\\(?:text|mathrm|mbox|textrm|operatorname)\s*\{([^{}\d]*)\}\s*(\^\s*\{?[23]\}?)?\s*$"
)
_PLAIN_UNIT = re.compile(r"(?<=[\d}).])\s+([A-Za-z][A-Za-z./°' -]*?)([²³]|\^[23])?$")
_GLUED_UNIT = re.compile(r"(?<=\d)(mm|cm|km|kg|mg|ft|in|sec|min|usd)([²³]|\^[23])?$", re.IGNORECASE)


def _split_unit(text: str) -> Side:
    for pattern in (_LATEX_UNIT, _PLAIN_UNIT, _GLUED_UNIT):
        match = pattern.search(text)
        if match and re.search(r"[\dA-Za-z]", text[: match.start()]):
            return Side(text[: match.start()].strip(), _unit_name(match[1], match[2]))
    return Side(text, "")


def _unit_name(name: str, power: str | None) -> str:
    name = " ".join(name.lower().strip(" .").split())
    if name not in _UNITS and name.endswith("es") and name[:-2] in _UNITS:
        name = name[:-2]
    if name not in _UNITS and name.endswith("s") and len(name) > 2:
        name = name[:-1]
    digit = re.sub(r"[^23²³]", "", power or "").translate(str.maketrans("²³", "23"))
    if digit and name in _UNITS:
        dimension, factor = _UNITS[name]
        top, _, bottom = factor.partition("/")
        scaled = f"{int(top) ** int(digit)}/{int(bottom or 1) ** int(digit)}"
        _UNITS[f"{name}^{digit}"] = (f"{dimension}^{digit}", scaled)
    return f"{name}^{digit}" if digit else name


def _same_unit_letters(gold: Side, given: Side) -> Side:
    """`5m` where the gold is `5\\text{ m}`: the letter is the unit, not a variable."""
    if gold.unit and not given.unit and re.search(rf"\d\s*(?:\\,)?{re.escape(gold.unit)}$", given.latex):
        return Side(given.latex[: -len(gold.unit)].strip(), gold.unit)
    return given


# ------------------------------------------------------------------------------------------------- text into LaTeX

_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf)\s*\{([^{}]*)\}")
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "²": "^2", "³": "^3",
    "°": r"^\circ", "\u00a0": " ", "⁄": "/",
}  # fmt: skip
_PLAIN = (
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"<=|=<"), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", re.IGNORECASE), r"\\infty "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])", re.IGNORECASE), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan)(?![a-z])"), r"\\\1 "),
    (re.compile(r"(?<=[\])])\s*U\s*(?=[\[(])"), r"\\cup "),
    (re.compile(r"\\text\s*\{\s*(?:or|and)\s*\}|(?<=\s)(?:or|and)(?=\s)"), ","),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s?/\s?(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\^\s*(-?\d{2,}|-\d)"), r"^{\1}"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
)


def _side(text: str) -> Side | None:
    """A formula in LaTeX with its unit; None if the text is prose."""
    text = text.strip()
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"\\?\$|\\[()\[\]](?![^\\]*\\right)", "", text).strip().rstrip(".").strip()
    text = re.sub(r"^\(([A-Za-z])\)$", r"\1", text)
    latex, unit = _split_unit(text)
    latex = _TEXT.sub(lambda m: f" {m[1]} " if re.search(r"\b(?:or|and)\b|\d", m[1]) else m[0], latex)
    if "\\" not in latex and latex.startswith("{") and latex.endswith("}"):
        latex = rf"\{{{latex[1:-1]}\}}"
    for word, opening, closing in (
        ("sqrt", r"\sqrt{", "}"),
        ("√", r"\sqrt{", "}"),
        ("abs", "|", "|"),
        ("^", "^{", "}"),
    ):
        latex = _call(latex, word, opening, closing)
    for pattern, replacement in _PLAIN:
        latex = pattern.sub(replacement, latex)
    return None if not latex or _numbers().is_prose(latex) else Side(_solutions(latex.strip()), unit)


def _solutions(latex: str) -> str:
    """`x=5, x=-5` as the set of its values; anything else as it is."""
    parts = [re.fullmatch(r"\s*([A-Za-z])\s*=\s*([^=]+)", part) for part in latex.split(",")]
    if len(parts) > 1 and all(parts) and len({part[1] for part in parts if part}) == 1:
        return rf"\{{{', '.join(part[2].strip() for part in parts if part)}\}}"
    return latex


def _call(text: str, word: str, opening: str, closing: str) -> str:
    """`word(…)` as `opening…closing`, parentheses matched."""
    start = 0
    while (at := text.find(f"{word}(", start)) >= 0:
        start = at + len(word) + 1
        if at > 0 and (text[at - 1] == "\\" or (text[at - 1].isalpha() and word.isalpha())):
            continue
        depth, i = 1, start
        while i < len(text) and depth:
            depth += (text[i] == "(") - (text[i] == ")")
            i += 1
        if depth:
            break
        text = f"{text[:at]}{opening}{text[start : i - 1]}{closing}{text[i:]}"
        start = at + len(opening)
    return text


def _word(text: str) -> str | None:
    """The answer as a lower-case word if it is one word in letters, or all of it stands in `\\text{…}`."""
    text = text.strip().strip("$").strip().rstrip(".")
    boxed = _TEXT.fullmatch(text)
    inner = (boxed[1] if boxed else text).strip()
    if boxed and not re.search(r"\d", inner) and inner:
        return inner.lower()
    if re.fullmatch(r"[^\W\d_]+", inner) and (len(inner) > 3 or inner.lower() in ("yes", "no")):
        return inner.lower()
    return None
