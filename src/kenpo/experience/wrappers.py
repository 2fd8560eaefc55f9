r"""Taking the wrapping off one answer: math delimiters, text commands, brackets, emphasis, quotes, code fences.

`\text{42}`, `{{42}}`, `(42)`, `\left[42\right]`, `\displaystyle 42`, `\approx 42`, `$$42$$`, `**42**` all hold 42. What
is in the wrapping is not changed; brackets around several things (`(1, 2)`, `{1, 2}`) belong to the answer and stay.
Imports nothing of Kenpo, as the worker of `math_verify` needs it without torch.
"""

from __future__ import annotations

import re

LONGEST = 2_000  # characters of an explicit answer; a longer one is no answer
_ROUNDS = 24  # layers that are taken off at most

TEXT_COMMANDS = (
    "text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "emph", "mbox", "hbox", "mathrm", "mathbf",
    "mathit", "mathsf", "mathtt", "boldsymbol", "bm", "underline", "ensuremath", "boxed", "fbox", "framebox",
)  # fmt: skip
_COMMAND = re.compile(r"\\(?:" + "|".join(TEXT_COMMANDS) + r")\*?\s*\{")
_COLOR = re.compile(r"\\(?:text)?color\s*\{[a-zA-Z!0-9]{1,20}\}\s*")
_LEADING = re.compile(
    r"(?:\\(?:displaystyle|textstyle|scriptstyle|bf|rm|it|bfseries|small|large|Large|LARGE|huge|Huge|quad|qquad|approx|simeq|sim|cong|thinspace)(?![A-Za-z])"
    r"|\\[,;:! ]|[~≈≃=]|</?(?:b|i|strong|em|p|br|span|u|code)\s*/?>|\s)+",
    re.IGNORECASE,
)
_TRAILING = re.compile(r"(?:\\(?:quad|qquad|thinspace)|\\[,;:! ]|~|\\\\|</?(?:b|i|strong|em|p|br|span|u|code)\s?/?>)$")
_FENCE = re.compile(r"```[\w+-]{0,20}[ \t]*\n?(.*?)\n?[ \t]*```", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\begin\{(equation|align|gather|aligned|gathered|split|displaymath|math|center)\*?\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_QUOTES = ('""', "''", "“”", "‘’", "„“", "«»", "``")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_SIZE = re.compile(r"\\(?:left|right|big|Big|bigg|Bigg)[lr]?(?=[()\[\]{}|.\\])")


def unwrap(text: str) -> str:
    """`text` without the wrapping around the whole of it; a final stop goes as well.

    >>> unwrap(r"$\\boxed{\\left(\\text{42}\\right)}$."), unwrap("(1, 2)"), unwrap("**(B)**")
    ('42', '(1, 2)', 'B')
    """
    for _ in range(_ROUNDS if len(text) <= 4 * LONGEST else 0):
        inner = _peel(text)
        if inner == text:
            break
        text = inner
    return text


def _peel(text: str) -> str:
    text = _TRAILING.sub("", text.rstrip()).rstrip()
    if _LEADING.fullmatch(text):
        return ""
    text = text[match.end() :] if (match := _LEADING.match(text)) else text
    text = text.strip("*")
    if len(text) > 1 and text[-1] in ".,;:" and text[-2] != "\\":
        return text[:-1]
    if (fence := _FENCE.fullmatch(text)) is not None:
        return fence[1]
    return _without_delimiters(_without_command(_without_brackets(text)))


def _without_delimiters(text: str) -> str:
    text = strip_math(text)
    environment = _ENVIRONMENT.match(text)
    if environment and text.endswith("}"):
        end = text.rfind("\\end{" + environment[1])
        if end > environment.end():
            lines = [line for line in text[environment.end() : end].replace("&", "").split("\\\\") if line.strip()]
            return lines[-1] if lines else ""
    for pair in _QUOTES:
        if len(text) > 2 and text[0] == pair[0] and text[-1] == pair[1] and pair[0] not in text[1:-1]:
            return text[1:-1]
    if len(text) > 2 and text[0] == text[-1] == "_" and "_" not in text.strip("_"):
        return text.strip("_")
    return text


def strip_math(content: str) -> str:
    r"""`content` without one enclosing pair of `$…$`, `$$…$$`, `\(…\)` or `\[…\]`, if it is one formula."""
    content = content.strip()
    for left, right in _DELIMITERS:
        inner = content[len(left) : len(content) - len(right)]
        whole = len(content) > len(left) + len(right) and content.startswith(left) and content.endswith(right)
        if whole and left not in inner and not inner.endswith("\\"):
            return inner.strip()
    return content


def _without_command(text: str) -> str:
    command = _COMMAND.match(text)
    if command and closing(text, command.end() - 1) == len(text) - 1:
        return text[command.end() : -1]
    return text[color.end() :] if (color := _COLOR.match(text)) else text


def _without_brackets(text: str) -> str:
    plain = _SIZE.sub("", text)
    if len(plain) < 3 or plain[0] not in "([{":
        return text
    end = closing(plain, 0)
    return plain[1:-1] if end == len(plain) - 1 and not _several(plain[1:-1]) and plain[1:-1].strip() else text


_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def _several(text: str) -> bool:
    """Whether a comma or semicolon outside brackets separates parts; one between digit groups (`1,000`) does not."""
    text, depth = _GROUPED.sub("", text), 0
    for before, character in zip(" " + text, text, strict=False):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth <= 0 and before != "\\":
            return True
    return False


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed by its like (`\\{` and `\\}` are no brackets); -1 if nowhere."""
    left = text[start]
    right = _CLOSES[left]
    depth, i, stop = 0, start, min(len(text), start + 2 * LONGEST)
    while i < stop:
        character = text[i]
        if character == "\\":
            i += 2
            continue
        depth += (character == left) - (character == right)
        if depth == 0:
            return i
        i += 1
    return -1


def braced(text: str, start: int) -> str | None:
    """The text from `start` up to the brace that closes the one just before it; None if it never closes."""
    end = closing(text, start - 1)
    return text[start:end] if 0 <= end <= start + LONGEST else None
