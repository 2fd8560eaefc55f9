"""From a command line to a dataclass: tyro reads the options, this file turns its complaints into one line."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

from kenpo.commands.help import Groups, help_text
from kenpo.errors import InputError, unknown_name

HELP = ("-h", "--help")
T = TypeVar("T")


def merge_repeats(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """`--set A --set B` as `--set A B`, so that a list option may be repeated without losing the earlier values."""
    rest: list[str] = []
    lists: dict[str, list[str]] = {}
    values: list[str] | None = None
    for arg in argv:
        name, equals, value = arg.partition("=")
        if name in names:
            values = lists.setdefault(name, [])
            if equals:
                values.append(value)
                values = None
        elif arg.startswith("--"):
            values = None
            rest.append(arg)
        else:
            (rest if values is None else values).append(arg)
    for name, collected in lists.items():
        rest += [name, *collected]
    return rest


def take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of option `name` (None if absent) and the other arguments. InputError if its value is missing."""
    value: str | None = None
    rest: list[str] = []
    items = iter(argv)
    for arg in items:
        if arg == name:
            value = next(items, None)
            if value is None or value.startswith("--"):
                raise InputError(f"{name} needs a value")
        elif arg.startswith(name + "="):
            value = arg.partition("=")[2]
        else:
            rest.append(arg)
    return value, rest


def positional(
    argv: Sequence[str], prog: str, description: str, cls: type, groups: Groups | None = None
) -> tuple[str, list[str]]:
    """The model's name in front of the options, and these. InputError without one."""
    if argv and argv[0] in HELP:
        parse(cls, ["--help"], prog=prog, description=description, groups=groups)
    if not argv or argv[0].startswith("-"):
        raise InputError(f"name the model first: {prog} [OPTIONS]")
    return argv[0], list(argv[1:])


def parse(
    cls: type[T], argv: Sequence[str], *, prog: str, description: str, default: T | None = None,
    groups: Groups | None = None,
) -> T:  # fmt: skip
    """An instance of dataclass `cls`; `--help` prints and leaves with status 0. InputError for bad options.

    With `groups` the help lists the options under their titles.
    """
    description = inspect.cleandoc(description)
    if groups is not None and any(arg in HELP for arg in argv):
        print(help_text(cls, prog, description, groups, default), end="")
        raise SystemExit(0)
    import tyro

    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, args=list(argv), prog=prog, description=description, **kwargs)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        complaint = _first_section(errors.getvalue())
        if complaint.startswith("Unrecognized options"):
            _refuse_unknown(cls, argv)
        complaint = complaint.removeprefix(f"Error parsing {cls.__name__}: ")
        raise InputError(f"{complaint} (see {prog} --help)") from None


def option_names(cls: Any) -> list[str]:
    """The options of a dataclass as they are typed."""
    hints, names = get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        given = [getattr(m, "name", None) for m in getattr(hints[field.name], "__metadata__", ())]
        names.append("--" + (next(filter(None, given), None) or field.name).replace("_", "-"))
    return names


def _refuse_unknown(cls: Any, argv: Sequence[str]) -> None:
    """UnknownNameError for the first option that there is not, with its near misses."""
    known = option_names(cls)
    for arg in argv:
        name = arg.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known and name.replace("--no-", "--", 1) not in known:
            raise unknown_name("option", name, known) from None


def _first_section(box: str) -> str:
    """The first paragraph of tyro's box of complaints, on one line."""
    lines: list[str] = []
    for line in box.splitlines()[1:]:
        text = re.sub(r"^[│|]|[│|]$", "", line.strip()).strip()
        if text and not set(text) <= set("─╰╯╭╮+-"):
            lines.append(text)
        elif text and lines:
            break
    return " ".join(lines) or "the options can't be read"
