r"""Finding the answer in a completion.

Explicit forms, of which the one that starts last in the text counts:

- `<answer>17</answer>`, taken word for word
- `\boxed{17}` or `\fbox{17}`, braces matched
- `#### 17`, to the end of the line
- `Answer: 17`, `the final answer is 17`, `answer = 17`, to the end of the sentence or line

What has no explicit form is read as each verifier says (the last number, the last formula, the whole text).
Everything here takes time linear in the text: completions of a million characters are read in well under a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kenpo.experience.numerals import is_prose, parse_number

_TAG = re.compile(r"<answer>", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed?\s*\{|\\fbox\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_MARKER = re.compile(r"\banswer\b[*_]{0,3}[ \t]{0,4}(?:is|are|was|would be|will be|:|=)[*_: \t]{0,8}\n?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?;](?=\s|$)")
_LONGEST = 2_000  # characters of an explicit answer; a longer one is no answer


def explicit_answer(text: str) -> str | None:
    """The content of the last explicit form, stripped; None if the text has none (or only empty ones)."""
    for _, content in sorted(_forms(text), reverse=True):
        if content:
            return content
    return None


def gold_after_marker(text: str) -> str | None:
    """What follows the last `####` of a GSM8K-style solution; None without one or with nothing after it."""
    found = text.rpartition("####")
    return (found[2].strip() or None) if found[1] else None


def _forms(text: str) -> Iterator[tuple[int, str]]:
    """(position, content) of the last few explicit forms of each kind."""
    for kind in (_tagged, _boxed, _hashed, _marked):
        yield from kind(text)


def _last(pattern: re.Pattern[str], text: str, count: int = 4) -> list[re.Match[str]]:
    # keep a few: the last one may be empty ("The answer is:" and nothing more)
    found: list[re.Match[str]] = []
    for match in pattern.finditer(text):
        found.append(match)
        if len(found) > count:
            del found[0]
    return found


def _tagged(text: str) -> Iterator[tuple[int, str]]:
    for match in _last(_TAG, text):
        end = text.lower().find("</answer>", match.end(), match.end() + _LONGEST)
        if end >= 0:
            yield match.start(), text[match.end() : end].strip()


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    for match in _last(_BOX, text):
        content = braced(text, match.end())
        if content is not None:
            yield match.start(), strip_math(content)


def braced(text: str, start: int) -> str | None:
    """The text from `start` up to the brace that closes the one just before it; None if it never closes."""
    depth, i, stop = 1, start, min(len(text), start + _LONGEST)
    while i < stop:
        character = text[i]
        if character == "\\":  # \{ and \} are not grouping
            i += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:i]
        i += 1
    return None


def _hashed(text: str) -> Iterator[tuple[int, str]]:
    for match in _last(_HASHES, text):
        yield match.start(), _unwrap(match[1][:_LONGEST])


def _marked(text: str) -> Iterator[tuple[int, str]]:
    for match in _last(_MARKER, text):
        window = text[match.end() : match.end() + _LONGEST]
        end = _SENTENCE_END.search(window, len(window) - len(window.lstrip()))
        yield match.start(), _unwrap(window[: end.start()] if end else window)


def _unwrap(content: str) -> str:
    """`content` without surrounding blanks, Markdown emphasis, a final stop and one pair of math delimiters."""
    content = content.strip().strip("*").strip()
    if len(content) > 1 and content[-1] in ".,;:" and content[-2] != "\\":
        content = content[:-1].rstrip().rstrip("*")
    return strip_math(content)


def strip_math(content: str) -> str:
    r"""`content` without one enclosing pair of `$…$`, `$$…$$`, `\(…\)` or `\[…\]`, if it is one formula."""
    content = content.strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = content[len(left) : len(content) - len(right)]
        if content.startswith(left) and content.endswith(right) and inner and left not in inner:
            return inner.strip()
    return content


_FORMULA = re.compile(
    r"\$\$([^$]{1,2000})\$\$|(?<!\\)\$([^$\n]{1,2000})(?<!\\)\$|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)", re.DOTALL
)
_SHORT = 200  # characters of a text that may be one formula as a whole


def stated_formula(text: str) -> str | None:
    """The explicit answer, else the last formula in math delimiters, else the text itself if it is one short line.

    Prose of more than one line has none (None).
    """
    stated = explicit_answer(text)
    if stated is not None:
        return stated
    tail = text[-_LONGEST * 4 :]
    formulas = _last(_FORMULA, tail, count=1)
    if formulas:
        return next(group for group in formulas[-1].groups() if group is not None).strip()
    whole = _unwrap(text) if len(text) <= _SHORT else ""
    # "600 seconds" is a number with its unit; one word may be the answer ("even")
    formula = not is_prose(whole) or parse_number(whole) is not None or whole.isalpha()
    return whole if whole and "\n" not in whole and formula else None
