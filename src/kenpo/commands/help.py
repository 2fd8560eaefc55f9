"""What `--help` prints for a dataclass of options: in groups, each option with what it takes, what it does and its
default."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Beside(NamedTuple):
    """An option that is no field: it is read before the others."""

    option: str
    kind: str
    text: str


Groups = Mapping[str, Sequence[str | Beside]]
"""Title -> the fields under it. Those in no group come last, under OTHER."""

OTHER = "further options"
_KINDS = {str: "TEXT", int: "N", float: "X", bool: ""}
_INDENT = 26


def help_text(cls: Any, prog: str, description: str, groups: Groups, default: Any = None) -> str:
    """The page for `cls`; `default` holds what an option is without being given (else the fields' own defaults)."""
    width = max(60, min(110, shutil.get_terminal_size((100, 24)).columns))
    said = docstrings(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    listed = {name for names in groups.values() for name in names}
    rest = [name for name in fields if name not in listed]
    lines = [f"usage: {prog} [--help] [OPTIONS]", "", inspect.cleandoc(description).rstrip()]
    for title, names in [*groups.items(), (OTHER, rest)]:
        known = [n for n in names if n in fields or isinstance(n, Beside)]
        if known:
            lines += ["", f"{title}:"]
        for name in known:
            if isinstance(name, Beside):
                lines += option_lines(*name, None, width)
                continue
            value = getattr(default, name) if default is not None else default_of(fields[name])
            lines += option_lines(spelled(cls, name), taken(cls, name), said.get(name, ""), value, width)
    return "\n".join([*lines, ""])


def default_of(field: Any) -> Any:
    """A field's own default; None where it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def docstrings(cls: Any) -> dict[str, str]:
    """The string under each field of a dataclass, on one line, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def spelled(cls: Any, name: str) -> str:
    """The option of a field as it is typed."""
    given = [getattr(m, "name", None) for m in _metadata(cls, name)]
    return "--" + (next(filter(None, given), None) or name).replace("_", "-")


def taken(cls: Any, name: str) -> str:
    """What stands after the option: TEXT, N, X, {a,b}, or nothing for a switch."""
    for item in _metadata(cls, name):
        metavar = getattr(item, "metavar", None)
        if metavar:
            return f"{metavar} ..."
    annotation = typing.get_type_hints(cls)[name]
    both = bool in typing.get_args(annotation)  # neither on nor off unless it is said
    return f"/ {spelled(cls, name).replace('--', '--no-', 1)}" if both else _kind(annotation)


def _metadata(cls: Any, name: str) -> tuple[Any, ...]:
    return getattr(typing.get_type_hints(cls, include_extras=True)[name], "__metadata__", ())


def _kind(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin in (typing.Union, types.UnionType):
        return next((_kind(a) for a in args if a is not types.NoneType), "")
    if origin is tuple:
        return f"{_kind(args[0])} ..." if args[-1] is Ellipsis else " ".join(map(_kind, args))
    return _KINDS.get(annotation, "TEXT")


def option_lines(option: str, kind: str, text: str, default: Any, width: int) -> Iterator[str]:
    """An option's lines: the option and what it takes on the left, its text on the right."""
    if default is True:
        option = option.replace("--", "--no-", 1)
    head = f"  {option} {kind}".rstrip()
    if not isinstance(default, bool) and default not in (None, (), ""):
        shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        text = f"{text.rstrip('.')} (default: {shown})"
    body = textwrap.wrap(text, width - _INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    if len(head) > _INDENT - 2:
        yield head
    else:
        yield f"{head:<{_INDENT}}{body.pop(0)}"
    yield from (" " * _INDENT + line for line in body)
