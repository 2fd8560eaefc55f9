r"""One written formula as LaTeX that math_verify can read, with its unit split off.

Plain text is written as LaTeX first: `3*pi/2`, `sqrt(2)/2`, `x**2`, `3 1/4`, `x <= 3`, `{1, 2}`, `5 or -5`; a list may
have "and" or "or" before its last entry, after a comma or not. Imports nothing but its neighbours without torch.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from kenpo.experience.numerals import is_prose
from kenpo.experience.units import unit_words
from kenpo.experience.wrappers import unwrap


class Side(NamedTuple):
    """One side of a comparison: its LaTeX without the unit, and the unit ("" for none)."""

    latex: str
    unit: str


_SPACE = r"(?:\s|\\[,;:! ]|~|\\q?quad(?![a-z]))"
_COMMAND = r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf|textit|hbox|textnormal)"
_TEXT = re.compile(_COMMAND + r"\s*\{([^{}]*)\}")
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "²": "^2",
    "³": "^3", "°": r"^\circ", "\u00a0": " ", "⁄": "/", "½": r"\frac{1}{2}", "∛": r"\sqrt[3]", "∅": r"\emptyset ",
    "\u2009": " ", "\u202f": " ", "．": ".",
}  # fmt: skip
_JOIN = re.compile(
    rf"{_SPACE}*[,;]?{_SPACE}*(?:{_COMMAND}\s*\{{\s*[,;]?\s*(?:or|and)\s*\}}|(?<=[\s,;~])(?:or|and)(?=[\s~$\\])){_SPACE}*[,;]?"
)
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
    (re.compile(r"(?<=\d)\{,\}(?=\d{3})|(?<=\d)\\[,!](?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s?/\s?(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d{1,4})(?![\w.])"), r"\\times 10^{\1}"),
    (re.compile(r"\^\s*(-?\d{2,}|-\d)"), r"^{\1}"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\root\s*(\w{1,4})\s*\\of\s*(\{|\w)"), r"\\sqrt[\1]\2"),
    (re.compile(r"\\sqrt\s*\[\s*([^\[\]]{1,20})\s*\]\s*"), r"\\sqrt[\1]"),
    (re.compile(r"\\sqrt\[([^\[\]]{1,20})\]([0-9A-Za-z]|\\pi(?![a-z]))"), r"\\sqrt[\1]{\2}"),
    (re.compile(r"\\sqrt(\[[^\[\]]{1,20}\])(\\frac\{[^{}]{1,60}\}\{[^{}]{1,60}\})"), r"\\sqrt\1{\2}"),
    (re.compile(r"\s*(?:percent|per\s?cent|pct)(?![A-Za-z])", re.IGNORECASE), r"\\%"),
    (re.compile(r"(?<!\\)%"), r"\\%"),
)
_REPEATING = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\(?:overline|bar|dot)\s*(?:\{(\d{1,40})\}|(\d))")
_CALLS = (
    ("cbrt", r"\sqrt[3]{", "}"),
    ("sqrt", r"\sqrt{", "}"),
    ("√", r"\sqrt{", "}"),
    ("abs", "|", "|"),
    ("^", "^{", "}"),
)
_PERCENT_WORD = re.compile(rf"{_SPACE}*{_COMMAND}\s*\{{\s*(?:percent|per\s?cent|pct|\\?%)\s*\}}", re.IGNORECASE)


def formula(text: str) -> Side | None:
    """A formula in LaTeX with its unit; None if the text is prose."""
    text = _PERCENT_WORD.sub(r"\\%", text.strip())
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"(?<!\\)\$|\\[()\[\]](?![^\\]*\\right)", "", text).replace("\\$", "").strip().rstrip(".").strip()
    text = unwrap(text) or text
    latex, unit = _split_unit(text)
    latex = _REPEATING.sub(_repeating, _JOIN.sub(", ", latex))
    latex = _TEXT.sub(lambda m: f" {m[1]} " if re.search(r"\b(?:or|and)\b|\d", m[1]) else m[0], latex)
    if "\\" not in latex and latex.startswith("{") and latex.endswith("}"):
        latex = rf"\{{{latex[1:-1]}\}}"
    for word, opening, closing in _CALLS:
        latex = _call(latex, word, opening, closing)
    for pattern, replacement in _PLAIN:
        latex = pattern.sub(replacement, latex)
    return None if not latex or is_prose(latex) else Side(_solutions(latex.strip(" ,;")), unit)


def _repeating(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction."""
    whole, fixed, cycle = match[1] or "0", match[2], match[3] or match[4]
    value = Fraction(int(whole + fixed + cycle) - int(whole + fixed), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


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


# -------------------------------------------------------------------------------------------------------------- units

_LATEX_UNIT = re.compile(rf"{_SPACE}*(?:{_COMMAND}|\\operatorname)\s*\{{([^{{}}\d]*)\}}\s*(\^\s*\{{?[23]\}}?)?\s*$")
_PLAIN_UNIT = re.compile(r"(?<=[\d}).])\s+([A-Za-z][A-Za-z./°' -]*?)([²³]|\^\{?[23]\}?)?$")
_GLUED_UNIT = re.compile(r"(?<=\d)(mm|cm|km|kg|mg|ft|in|sec|min|usd)([²³]|\^\{?[23]\}?)?$", re.IGNORECASE)
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*$")


def _split_unit(text: str) -> Side:
    """The text without the unit at its end. `and` before a word of units makes it no unit but a list."""
    for pattern in (_LATEX_UNIT, _PLAIN_UNIT, _GLUED_UNIT):
        match = pattern.search(text)
        if match and re.search(r"[\dA-Za-z]", text[: match.start()]) and not re.match(r"\s*(?:or|and|mod)\b", match[1]):
            return Side(text[: match.start()].strip(), unit_words(match[1] + (match[2] or "")))
    degrees = _DEGREES.search(text)
    return Side(text[: degrees.start()], "°") if degrees else Side(text, "")


def same_unit_letter(gold: Side, given: Side) -> Side:
    """`5m` where the gold is `5\\text{ m}`: the letter is the unit, not a variable."""
    if gold.unit and not given.unit:
        match = re.search(rf"(?<=\d)\s*{_SPACE}*{re.escape(gold.unit)}$", given.latex)
        if match:
            return Side(given.latex[: match.start()].strip(), gold.unit)
    return given


_SAYINGS = re.compile(
    r"no (?:real )?solutions?|does not exist|not defined|all (?:real|rational|positive) numbers"
    r"|infinitely many(?: solutions)?|cannot be determined|not enough information"
)


def word(text: str) -> str | None:
    """The answer in lower case if it is one word, a saying ("no solution"), or stands in `\\text{…}` as a whole."""
    plain = unwrap(text)
    boxed = _TEXT.fullmatch(text.strip().strip("$").strip().rstrip("."))
    inner = " ".join(plain.split()).lower()
    said = boxed or _SAYINGS.fullmatch(inner) or (inner.isalpha() and (len(inner) > 3 or inner in ("yes", "no")))
    return inner if said and plain and not re.search(r"[\d\\=+*/^<>]", plain) else None
