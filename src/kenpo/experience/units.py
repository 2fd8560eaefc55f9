"""Units beside a number: how one is spelled, and whether two stated ones are the same. Nothing is converted.

A missing unit is ignored, a stated one is compared as text: `5` is `5 cm`, `5 centimeters` is `5 cm`, `50 mm` is not.
"""

from __future__ import annotations

import re

_SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gramme", "kg": "kilogram kilo", "lb": "pound lbs", "oz": "ounce",
    "ms": "millisecond", "s": "sec second", "min": "minute", "h": "hr hour", "d": "day",
    "ml": "milliliter millilitre", "l": "liter litre", "mi/h": "mph", "km/h": "kph kmh", "rad": "radian",
    "$": "dollar usd", "€": "euro eur", "¢": "cent", "°": "degree deg circ", "%": "percent pct",
}  # fmt: skip
_CANONICAL = {word: unit for unit, words in _SPELLINGS.items() for word in words.split()}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_STOP = frozenset((
    "a", "about", "altogether", "an", "and", "are", "as", "at", "because", "but", "by", "each", "every", "for", "from",
    "has", "have", "if", "into", "is", "left", "less", "more", "of", "on", "or", "out", "remaining", "so", "that",
    "the", "there", "to", "total", "was", "were", "when", "where", "which", "who", "with", "would",
))  # fmt: skip


def unit_words(text: str) -> str:
    """The unit that a text behind a number begins with, in one spelling; "" if there is none.

    >>> unit_words(" square meters in all"), unit_words("cm²"), unit_words("miles per hour"), unit_words("is right")
    ('m^2', 'cm^2', 'mi/h', '')
    """
    text = re.sub(r"\^\s*\{?\s*\\circ(?![a-z])", " ° ", text)
    text = text.replace("²", "^2").replace("³", "^3").replace("\\", " ").replace("{", "").replace("}", "")
    text = re.sub(r"\bper\s+cent\b", "%", text.lower())
    text = re.sub(r"\s*\bper\b\s*|\s*/\s*", "/", text)
    text = re.sub(r"\s*\^\s*", "^", re.sub(r"\s+squared\b", "^2", re.sub(r"\s+cubed\b", "^3", text)))
    words, power = [], ""
    parts = text.split()
    for place, word in enumerate(parts):
        if word == "in" and (place or len(parts) > 1):
            break  # "5 in" is five inches, "5 in all" is five
        word = word.strip(".,;:!?\"'()[]*_`")
        if not word or (word in _STOP and not power) or any(c.isdigit() for c in word.partition("^")[0]):
            break
        if word in _POWERS:
            power = _POWERS[word]
            continue
        words.append("/".join(_spelled(part) for part in word.split("/")) + power)
        power = ""
        if len(words) == 4:
            break
    return " ".join(words)


def _spelled(word: str) -> str:
    """`word` in one spelling: `meters` and `metre` as `m`, a plural as the singular; its power stays."""
    name, caret, power = word.partition("^")
    for candidate in (name, name.removesuffix("s"), name.removesuffix("es")):
        if candidate in _SPELLINGS or candidate in _CANONICAL:
            return _CANONICAL.get(candidate, candidate) + caret + power
    return (name[:-1] if len(name) > 3 and name.endswith("s") and not name.endswith("ss") else name) + caret + power


def same_unit(gold: str, answer: str) -> bool:
    """Whether two units (as `unit_words` gives them) don't contradict each other.

    One that is missing is ignored; `apple` and `apple left over` agree, `m` and `m/s` don't.
    """
    a, b = gold.split(), answer.split()
    short = min(len(a), len(b))
    return a[:short] == b[:short]
