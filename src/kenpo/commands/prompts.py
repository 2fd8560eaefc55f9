"""Prompts for `kenpo sample`: the command line's, the lines of a pipe, or what is typed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from kenpo.terminal import note


def lines(stream: Iterable[str]) -> Iterator[str]:
    """Each line without its end. A blank one gets no completion; a note says which, since lines and completions then
    no longer match one by one."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield line.rstrip("\r\n")
        else:
            note(f"line {number} of standard input is blank and gets no completion")


def prompts(given: str | None) -> Iterator[str]:
    """The one prompt of the command line, the lines of a pipe, or what is typed until an empty line or end of input."""
    if given is not None:
        yield given
        return
    if not sys.stdin.isatty():
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text are refused by prompt, by name
        yield from lines(sys.stdin)
        return
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        yield text
