"""Text of models, data and verifiers on its way to a terminal: what could steer the terminal is written out."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

#: Cc: controls such as ESC. Cf: marks that turn the direction of text or hide it. Cs: half a surrogate pair.
#: Zl, Zp: line breaks that are no "\n".
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # part of ordinary writing in many scripts, and of emoji


def plain(text: str, keep: str = "\n\t") -> str:
    r"""`text` with every control character written as its escape, but for those in `keep`.

    >>> print(plain("\x1b[31mred\x07"))
    \x1b[31mred\x07
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or c in _JOINERS or unicodedata.category(c) not in _STEERING else _escape(c) for c in text
    )


def one_line(text: str) -> str:
    r"""`plain` on one line: blanks and line breaks of any kind become one space.

    >>> one_line("a\n  b\x1b[2J")
    'a b\\x1b[2J'
    """
    return plain(" ".join(text.split()), keep="")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def to_stderr(line: str) -> None:
    """Show a line of foreign text to the one who reads along."""
    print(plain(line), file=sys.stderr, flush=True)


def warning_line(text: str, category: type[Warning], file: str) -> str | None:
    """A warning that Kenpo itself gives, as a note on one line without a place in its source; None for others'."""
    own = Path(file).is_relative_to(Path(__file__).parent) or category.__module__.startswith("kenpo.")
    return f"note: {one_line(text)}\n" if own else None


def note(line: str) -> None:
    """A note for the one who reads along."""
    to_stderr(f"note: {line}")


def bytes_of(n: int) -> str:
    """A size in the unit that suits it.

    >>> bytes_of(3 << 19)
    '1.5 MiB'
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
