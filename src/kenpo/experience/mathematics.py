r"""Equality of two written mathematical answers, by math_verify, with its known faults mended or answered "abstain".

Runs in a worker process and imports nothing of Kenpo but what reads text. What is done around math_verify:

- numbers, times of day, ratios, letters and words are compared here, by the reading that all verifiers share;
- each side is one formula, so none is reduced to the last number it holds: `2x+5y-1=0` and `x-y+4=0` differ;
- plain text is written as LaTeX first (`latex.py`); a missing unit is ignored, a stated one compared as text;
- numbers inside formulas are equal by relative tolerance, where math_verify rounds to decimal places: `10^{-20}` is not
  `10^{-21}`. Formulas without decimals are compared to 30 digits, with decimals as `numerals.close` has it;
- two expressions also count as equal if they agree wherever both are real: `\sqrt{1/m}` and `1/\sqrt{m}`
  (so m > 0 is assumed), but not |x| and x.

Kept from math_verify: gold first; a gold interval accepts no inequality as its answer, a gold inequality accepts the
interval; a value given as `x = 5` equals 5.

A gold that can't be read abstains for every answer. An answer in prose is wrong (0); one that looks like a formula
but can't be read or compared abstains.
"""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kenpo.experience.answers import choice
from kenpo.experience.latex import Side, formula, same_unit_letter, word
from kenpo.experience.numerals import (
    close,
    number_beside_equation,
    padded_digits,
    read_number,
    same_number,
    stated_number,
)
from kenpo.experience.remarks import without_explanation
from kenpo.experience.units import same_unit
from kenpo.experience.wrappers import unwrap

_UNREAD = object()
_DIGITS = 40  # digits to which formulas are evaluated
_EXACT = Fraction(1, 10**30)  # relative difference of two formulas without decimals that counts as none


def warm_up() -> None:
    """Import math_verify and parse once, so that the first sample's time limit is its own."""
    import math_verify.grader

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.grader.sympy_numeric_eq = _same_value  # its own rounds to decimal places
    _parse(r"\frac{1}{2}")


def compare(*, gold: str | Sequence[str], answer: str | None) -> dict[str, Any]:
    """A verdict as plain data. Of several golds any counts; if none can be read the verdict is "abstain".

    `answer` None: none was found, which is 0 unless the gold can't be read.
    """
    golds = [gold] if isinstance(gold, str) else list(gold)
    verdicts = [_compare(wanted, answer) for wanted in golds]
    if len(verdicts) == 1 or not verdicts:
        return verdicts[0] if verdicts else _abstain("there is no known answer")
    unread = next((verdict for verdict in verdicts if verdict.get("gold_unread")), None)
    best = max((verdict.get("reward", -1.0) for verdict in verdicts), default=-1.0)
    if unread is not None:
        return unread
    right = next((verdict for verdict in verdicts if verdict.get("reward") == best), None)
    undecided = next((verdict for verdict in verdicts if verdict["status"] == "abstain"), None)
    return right if right and (best > 0 or undecided is None) else undecided or verdicts[0]


def _compare(gold: str, answer: str | None) -> dict[str, Any]:
    verdict = _as_text(gold, answer)
    if verdict is not None:
        return _ok(verdict)
    number = read_number(gold)
    wanted = formula(gold)
    target = number if number else _UNREAD if wanted is None else _parse(wanted.latex)
    if target is _UNREAD or (wanted is None and number is None):
        return {**_abstain(f"the known answer {gold[:60]!r} can't be read as mathematics"), "gold_unread": True}
    if answer is None:
        return {**_ok(False), "detail": "no answer found"}
    answer = _explained(answer)
    if number is not None:
        found = stated_number(answer, whole=True) or number_beside_equation(answer)
        found = found or (stated_number(answer) if formula(answer) is None else None)
        if found is not None:
            return _ok(same_number(number, found))
    given = formula(answer)
    if given is None or wanted is None:
        return {**_ok(False), "detail": "the answer is not a formula"}
    return _by_formula(wanted, given, answer)


def _by_formula(wanted: Side, given: Side, answer: str) -> dict[str, Any]:
    given = same_unit_letter(wanted, given)
    target, parsed = _parse(wanted.latex), _parse(given.latex)
    if parsed is _UNREAD or target is _UNREAD:
        return _abstain(f"the answer {answer[:60]!r} can't be read as mathematics")
    if not same_unit(wanted.unit, given.unit):
        return _ok(False)
    return _by_math_verify(target, parsed)


def _explained(answer: str) -> str:
    """The answer without its explanation; of `1/3 \\approx 0.333` what stands before the sign, unless it is a name."""
    left, sign, right = re.sub(r"≈|\\approx(?![A-Za-z])", "≈", without_explanation(answer)).partition("≈")
    if sign and left.strip(" $\\([") and not re.search(r"[a-zA-Z]\s*$", left.replace(r"\pi", "")):
        return left + ("$" if left.count("$") % 2 else "")
    return f"{left}={right}" if sign and left.strip() else right or left


def _ok(right: bool) -> dict[str, Any]:
    return {"status": "ok", "reward": float(right)}


def _abstain(detail: str) -> dict[str, Any]:
    return {"status": "abstain", "detail": detail}


# --------------------------------------------------------------------------------------------------- compared as text

_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"\d{1,9}(?:\s?:\s?\d{1,9}){2,6}")


def _as_text(gold: str, answer: str | None) -> bool | None:
    """The verdict where the gold is digits with a leading zero, a time, a ratio, a letter or a word; None elsewhere."""
    wanted = _plain(gold)
    given = _plain(without_explanation(answer)) if answer is not None else ""
    if padded_digits(wanted) is not None:
        return given == wanted
    time, other = _TIME.fullmatch(wanted), _TIME.fullmatch(given)
    if time is not None:
        return other is not None and _same_time(time.groups(), other.groups())
    if other is not None and ":0" in given:
        return False  # 1:05 is a time, and no ratio
    if _RATIO.fullmatch(wanted):
        return _RATIO.fullmatch(given) is not None and _same_ratio(wanted, given)
    letter, chosen = choice(gold), None
    if answer is not None:
        chosen = choice(answer) or choice(without_explanation(answer))
    if letter is not None and not letter.text:
        return (
            None if chosen is None and answer is not None and formula(given) else letter.letter == (chosen or ("",))[0]
        )
    if letter is not None and chosen is not None:
        return letter.letter == chosen.letter and (not chosen.text or chosen.text == letter.text)
    if (said := word(gold)) is None:
        return None
    return answer is not None and said in (word(answer), word(given), chosen and word(chosen.text))


def _plain(text: str) -> str:
    return unwrap(re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text).replace("{:}", ":").replace(r"\!", ""))


def _same_time(a: Sequence[str | None], b: Sequence[str | None]) -> bool:
    """Equal hours, minutes and seconds; morning or afternoon only where both say so."""
    half = [str(side[3]).lower() for side in (a, b) if side[3]]
    return (int(a[0] or 0), a[1], a[2] or "00") == (int(b[0] or 0), b[1], b[2] or "00") and len(set(half)) < 2


def _same_ratio(a: str, b: str) -> bool:
    """`1:2:3` and `2:4:6`."""
    x, y = ([int(part) for part in side.split(":")] for side in (a, b))
    return len(x) == len(y) and all(p * y[0] == q * x[0] for p, q in zip(x, y, strict=True)) and any(x) == any(y)


# ----------------------------------------------------------------------------------------------------- by math_verify


def _by_math_verify(gold: Any, answer: Any) -> dict[str, Any]:
    import math_verify

    try:
        equal = math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        return _abstain(f"math_verify can't compare the two ({type(error).__name__}: {text})")
    return _ok(bool(equal) or _equal_where_real(gold, answer))


@functools.lru_cache(maxsize=2048)
def _parse(latex: str) -> Any:
    """A SymPy object, or _UNREAD. Kept, since a group of samples shares its gold."""
    import math_verify
    import sympy

    config = [math_verify.LatexExtractionConfig(boxed_match_priority=-1)]
    try:
        found = math_verify.parse(f"${latex}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    except (Exception, RecursionError):
        return _UNREAD
    read = found and not isinstance(found[0], str) and found[0] not in (sympy.zoo, sympy.nan)
    return found[0] if read else _UNREAD


def _same_value(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """In place of math_verify's numeric equality, which rounds: relative to the gold's size, entry by entry."""
    import sympy

    matrices = (sympy.MatrixBase, sympy.MatrixExpr)
    if isinstance(a, matrices) and isinstance(b, matrices):
        x, y = (m.doit() for m in (a, b))
        return x.shape == y.shape and all(
            _same_value(p, q, float_rounding, numeric_precision) for p, q in zip(x, y, strict=True)
        )
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    if a.free_symbols or b.free_symbols:
        return _equal_where_real(a, b)
    shares = [_hundredths(side) for side in (a, b)]
    if any(share is not None for share in shares):  # 9% is 9 and 0.09
        whole = [side if share is None else share for side, share in zip((a, b), shares, strict=True)]
        if _same_constant(*whole):
            return True
    return _same_constant(a, b)


def _hundredths(value: Any) -> Any:
    """The number of a percentage as math_verify reads it (`x * UnevaluatedExpr(1/100)`); None for anything else."""
    import sympy

    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    is_share = isinstance(value, sympy.Mul) and len(value.args) == 2 and value.args[1] == hundredth
    return value.args[0] if is_share else None


def _same_constant(a: Any, b: Any) -> bool:
    """Whether two expressions without symbols have one value: exactly, or by `close` where one holds decimals."""
    import sympy

    decimals = a.has(sympy.Float) or b.has(sympy.Float)
    try:
        x, y = (sympy.N(side.doit(), _DIGITS) for side in (a, b))
    except Exception:
        return False
    if x == y or not (x.is_finite and y.is_finite):
        return bool(x == y) and not x.has(sympy.nan, sympy.zoo)
    parts = [(sympy.re(x), sympy.re(y)), (sympy.im(x), sympy.im(y))]
    values = [(_fraction(p), _fraction(q)) for p, q in parts]
    size = max(abs(p) for p, _ in values)
    if decimals and len([p for p, _ in values if p]) == 1:
        return all(_close_decimals(p, q) for p, q in values)
    return all(abs(p - q) <= _EXACT * size for p, q in values)


def _fraction(value: Any) -> Fraction:
    import sympy

    ratio = sympy.Rational(value)
    return Fraction(int(ratio.p), int(ratio.q))


def _close_decimals(gold: Fraction, answer: Fraction) -> bool:
    """`close` for values that were rounded to 15 digits on the way: what is whole to 13 digits is whole."""
    whole = Fraction(round(gold))
    if whole and abs(gold - whole) <= abs(whole) / 10**13:
        return abs(answer - whole) <= abs(whole) / 10**13
    return close(gold=gold.limit_denominator(10**15) if gold.denominator == 1 else gold, answer=answer)


def _equal_where_real(gold: Any, answer: Any) -> bool:
    """Whether two expressions in the same symbols agree at random points, wherever both are real."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    symbols = sorted(gold.free_symbols, key=str)
    if not symbols or gold.free_symbols != answer.free_symbols:
        return False
    tolerance = 1e-6 if gold.has(sympy.Float) or answer.has(sympy.Float) else 1e-20
    draw, agreed = random.Random(0), 0
    for trial in range(24):
        low = 1 if trial % 3 == 0 else -300  # some points with all symbols positive
        point = {symbol: sympy.Rational(draw.randint(low, 300), 97) for symbol in symbols}
        try:
            a, b = (sympy.N(side.subs(point), 30) for side in (gold, answer))
        except Exception:
            return False
        if a.is_real and b.is_real and a.is_finite and b.is_finite:
            if abs(a - b) > tolerance * max(abs(a), abs(b)):
                return False
            agreed += 1
    return agreed >= 4
