r"""Finding the answer in a completion: the one reading that all verifiers share. The rules are a table in
docs/guides/answers.md, and each row of it is a test.

Explicit forms come first: `<answer>17</answer>` (word for word), `\boxed{17}` or `\fbox{17}`, `#### 17` to the end of
the line; the one that starts last in the text counts. Phrases are weaker and count only without them: `answer is 17`,
`Answer: 17`, to the end of the sentence or of the display formula; the last one counts. A remark ("the answer is
right"), a question, a condition and a placeholder (`\boxed{...}`) are no answer. What has none of these is read as each
verifier says (the last number, the last formula, the whole text).
Everything here takes time linear in the text: completions of a million characters are read in well under a second.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from kenpo.experience.numerals import is_prose, parse_number
from kenpo.experience.remarks import PLACEHOLDER, is_conditional, is_heading, is_remark, without_filler
from kenpo.experience.wrappers import LONGEST, braced, strip_math, unwrap

_TAG, _TAG_END = re.compile(r"<answer>", re.IGNORECASE), re.compile(r"</answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:f|frame)?box(?:ed)?\s{0,3}\{")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]{0,8}\n?[ \t]{0,8}([^\n]*)")
_MENTION = re.compile(r"\bans(?:wers?)?\b", re.IGNORECASE)
_VERB = (
    r"(?:(?:is|are|was|were|equals|becomes|(?:must|should|would|will|has to) be|comes (?:out )?to|turns out to be)\b"
    r"|[:=：→])"
)
_MARKER = re.compile(
    rf"""ans(?:wers?)?(?:\ (?:choice|option|value|number))?\b[*_]{{0,3}}\.?
    (?:[ ](?:to|for|of|in|from)[ ][^.:;=\n?!]{{1,60}}?)?(?:,[^.,:;=\n]{{1,40}},)?
    [*_ \t]{{0,6}}(?:{_VERB}|[*_:]{{0,4}}[ \t]{{0,8}}\n)""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADING_LINE = re.compile(r"(?:^|\n)[#*_> \t]{0,12}(?:(?:the|my|final|correct)[ \t]){0,2}\Z", re.IGNORECASE)
_SKIPPED = re.compile(r"(?:[\s*>:]|_{2}|</?(?:b|strong|em|i|p|br|span)\b[^>\n]{0,40}>)*")
_DISPLAYS = (
    (re.compile(r"\\\["), re.compile(r"\\\]")),
    (re.compile(r"\$\$"), re.compile(r"\$\$")),
    (re.compile(r"\$(?=\s*\n)"), re.compile(r"\$")),
    (re.compile(r"```[\w+-]{0,20}[ \t]*\n?"), re.compile(r"\n?[ \t]*```")),
    (re.compile(r"\\begin\{(?:equation|align|gather|displaymath|math|center)\*?\}"), re.compile(r"\\end\{")),
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“*$])(?:St|Dr|Mr|Mrs|Ms|Prof|Mt|Ft|Jr|vs|approx|ca|cf|e\.g|i\.e|U\.S|U\.K|No(?=. ?\d))$"
)
_UNFILLED = re.compile(r"\\f?boxed\s?\{\s*\}")
_KEPT = 64  # mentions of "answer" that are looked at, from the end
Kind = Literal["tag", "box", "hash", "phrase", "remark"]


class Stated(NamedTuple):
    """One statement of an answer: its text, its form, and for a phrase the line that it begins ("" otherwise)."""

    content: str
    kind: Kind
    line: str = ""


def spoken(text: str) -> str:
    """What counts of a completion: the text after the last `</think>`, unless nothing stands there."""
    head, mark, tail = text.rpartition("</think>")
    return tail if not mark or tail.strip() else head


def statements(text: str) -> list[Stated]:
    """All statements of an answer, the most trusted one first; remarks stand at the end."""
    explicit = [(at, _inner(Stated(content, kind))) for at, kind, content in _explicit(text)]
    found = [stated for _, stated in sorted(explicit, key=lambda item: item[0], reverse=True) if stated.content]
    found = [stated for stated in found if not _placeholder(stated.content)]
    phrases = list(_phrases(text))
    firm = [stated for stated in found if not is_remark(stated.content, explicit=True)]
    firm += [stated for stated in phrases if stated.kind == "phrase"]
    return firm + [Stated(s.content, "remark", s.line) for s in [*found, *phrases] if s not in firm]


def _placeholder(content: str) -> bool:
    """Whether a form is not filled in: `...`, an empty box, a calculation without its result (`12 + 13 =`)."""
    if _UNFILLED.match(content) or content.endswith("="):
        return True
    return any(PLACEHOLDER.fullmatch(text) for text in (content, unwrap(content)))


def stated_answer(text: str) -> Stated | None:
    """The statement that counts; None if there is none but remarks."""
    found = statements(spoken(text))
    return found[0] if found and found[0].kind != "remark" else None


def explicit_answer(text: str) -> str | None:
    """The content of the statement that counts, stripped; None if there is none (or only empty ones, or remarks)."""
    stated = stated_answer(text)
    return stated.content if stated else None


def gold_after_marker(text: str) -> str | None:
    """What follows the last `####` of a GSM8K-style solution; None without one or with nothing after it."""
    found = text.rpartition("####")
    return (found[2].strip() or None) if found[1] else None


def gold_text(answer: str) -> str:
    """The known answer in the text of a solution: after `####`, in its last box or tag, else all of it."""
    marked = gold_after_marker(answer)
    if marked is not None:
        return marked
    stated = next((s for s in statements(answer) if s.kind in ("box", "tag")), None)
    return stated.content if stated else answer


def accepted(answer: Any) -> tuple[Any, ...]:
    """The known answers of one problem: a list in the data means that any of them counts."""
    return tuple(answer) if isinstance(answer, list | tuple) else (answer,)


class Choice(NamedTuple):
    """A labelled choice of a test: its letter, and its text ("" if only the letter is named)."""

    letter: str
    text: str


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s{1,4})?(?:[(\[]([A-Za-z])[)\]][.:]?|([A-Za-z])[.:)\]])(?:\s{1,8}(\S.*))?",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{\s?([(\[]?[A-Za-z][)\].:]?)\s?\}")
_NO_TEXT = re.compile(r"(?:or|and|&|/|,)|[(\[]?[A-Za-z][)\].:]?(?:\s|$)", re.IGNORECASE)


def choice(text: str) -> Choice | None:
    """`(B)`, `B.`, `B) Paris`, `option B` or a bare `B` as a choice; None for anything else.

    >>> choice("(B)"), choice("B) Paris"), choice("(A) or (B)")
    (Choice(letter='B', text=''), Choice(letter='B', text='Paris'), None)
    """
    text = _LABEL.sub(r"\1", text.strip()).replace("\\ ", " ") if len(text) <= LONGEST else ""
    bare = unwrap(re.sub(r"(?i)^(?:option|choice)\s{1,4}", "", text))
    if len(bare) == 1 and bare.isascii() and bare.isalpha():
        return Choice(bare, "")
    match = _CHOICE.fullmatch(text) or _CHOICE.fullmatch(unwrap(text))
    if match is None or (match[3] and _NO_TEXT.match(match[3])):
        return None
    return Choice(match[1] or match[2], unwrap(match[3] or ""))


# ----------------------------------------------------------------------------------------------------- explicit forms


def _explicit(text: str) -> Iterator[tuple[int, Kind, str]]:
    """(position, form, content) of the last few explicit forms of each kind."""
    closed = False
    for match in _last(_TAG, text):
        end = _TAG_END.search(text, match.end(), match.end() + LONGEST)
        if end:
            closed = True
            yield match.start(), "tag", text[match.end() : end.start()].strip()
    for match in _last(_BOX, text):
        content = braced(text, match.end())
        if content is not None:
            closed = True
            yield match.start(), "box", strip_math(content)
    for match in _last(_HASHES, text):
        content = unwrap_line(match[1][:LONGEST])
        if re.search(r"\w|∞|∅", content) and not is_heading(content):
            closed = True
            yield match.start(), "hash", content
    opened = _last(_TAG, text, count=1)
    if opened and not closed and len(text) - opened[0].end() <= LONGEST:  # a stop string took the closing tag away
        yield opened[0].start(), "tag", text[opened[0].end() :].strip()


def _last(pattern: re.Pattern[str], text: str, count: int = 4) -> list[re.Match[str]]:
    # keep a few: the last one may be empty ("The answer is:" and nothing more)
    return list(deque(pattern.finditer(text), maxlen=count))


def _inner(stated: Stated) -> Stated:
    """`<answer>The answer is 42</answer>` states 42."""
    if "\n" in stated.content or len(stated.content) > 200:
        return stated
    inner = next((s for s in _phrases(stated.content) if s.kind == "phrase"), None)
    return Stated(inner.content, stated.kind, inner.line) if inner else stated


def unwrap_line(content: str) -> str:
    """`content` without surrounding blanks, Markdown emphasis, a final stop and one pair of math delimiters."""
    content = content.strip().strip("*").strip()
    if len(content) > 1 and content[-1] in ".,;:" and content[-2] != "\\":
        content = content[:-1].rstrip().rstrip("*")
    return strip_math(content)


# ------------------------------------------------------------------------------------------------------------ phrases


def _phrases(text: str) -> Iterator[Stated]:
    """Statements in words, the last one first."""
    for mention in reversed(_last(_MENTION, text, count=_KEPT)):
        match = _MARKER.match(text, mention.start())
        if match is None:
            continue
        before = text[max(0, mention.start() - 60) : mention.start()]
        if match[0].endswith("\n") and not _HEADING_LINE.search(before):
            continue
        start = match.end()
        window = text[start : start + LONGEST]
        window = window[skip.end() :] if (skip := _SKIPPED.match(window)) else window
        stated = _said(window)
        if stated.content and not _placeholder(stated.content):
            remark = is_conditional(before) or stated.kind == "remark" or is_remark(stated.content)
            yield stated._replace(kind="remark" if remark else "phrase")


def _said(window: str) -> Stated:
    """What is said from the start of `window`: a display formula, or the sentence."""
    body = without_filler(window)
    for opening, closing in _DISPLAYS:
        begun = opening.match(body)
        end = closing.search(body, begun.end()) if begun else None
        if begun and end:
            return Stated(body[begun.end() : end.start()].strip(), "phrase")
    end_at, question = sentence_end(body)
    line = window.partition("\n")[0]
    return Stated(unwrap_line(body[:end_at]), "remark" if question else "phrase", line)


def sentence_end(text: str, start: int = 0) -> tuple[int, bool]:
    """Where the sentence from `start` ends, and whether it is a question. A stop inside brackets ends nothing."""
    depth, first = 0, -1
    for i in range(start, len(text)):
        character = text[i]
        if character == "\n":
            return (i if depth <= 0 or first < 0 else first), False
        depth += (character in "([{") - (character in ")]}")
        if character in ".!?;。" and (i + 1 == len(text) or text[i + 1].isspace() or text[i + 1] in '*"”_'):
            if character == "." and _ABBREVIATION.search(text, max(start, i - 12), i):
                continue
            first = i if first < 0 else first
            if depth <= 0:
                return i, character == "?"
    return (len(text) if depth <= 0 or first < 0 else first), False


# ------------------------------------------------------------------------------------------------------ formulas, text

_FORMULA = re.compile(
    r"\$\$([^$]{1,2000})\$\$|(?<!\\)\$([^$\n]{1,2000})(?<!\\)\$|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)", re.DOTALL
)
_SHORT = 200  # characters of a text that may be one formula as a whole


def stated_formula(text: str) -> str | None:
    """The statement that counts, else the last formula in math delimiters, else the text if it is one short line.

    Prose of more than one line has none (None), unless it states nothing but a remark, which then stands.
    """
    text = spoken(text)
    found = statements(text)
    if found and found[0].kind != "remark":
        return found[0].content
    formulas = _last(_FORMULA, text[-LONGEST * 4 :], count=1)
    if formulas:
        return next(group for group in formulas[-1].groups() if group is not None).strip()
    whole = short_line(text)
    # "600 seconds" is a number with its unit; one word may be the answer ("even")
    formula = whole and not is_prose(whole) and not re.search(r"[;#]", whole)
    if whole and (formula or parse_number(whole) is not None or whole.isalpha() or choice(whole)):
        return whole
    return found[0].content if found else None


def short_line(text: str) -> str | None:
    """The text itself if it is one short line."""
    line = unwrap_line(spoken(text)) if len(text) <= _SHORT else ""
    return line if line and "\n" not in line else None
