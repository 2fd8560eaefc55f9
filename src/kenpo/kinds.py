"""Whether the values of an options dataclass are of the kinds that its annotations name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kenpo.errors import InputError, unknown_name


def _kinds(hint: Any) -> tuple[Any, ...]:
    """What a field's annotation allows: its members, `Annotated` and `Literal` taken off."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _kinds(part))
    return (str,) if get_origin(hint) is Literal else (hint,)


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(v, get_args(kind)[0]) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def _words(hint: Any) -> tuple[str, ...]:
    """The texts that a field's annotation allows; none where any text will do."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Annotated, Union, UnionType) else ()
    return tuple(word for part in parts for word in _words(part))


def _hints(cls: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _field_words(cls: type) -> dict[str, tuple[str, ...]]:
    return {name: words for name, hint in _hints(cls).items() if (words := _words(hint))}


@functools.cache
def _field_kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    return {name: _kinds(hint) for name, hint in _hints(cls).items()}


def check_kinds(options: Any, flag: Callable[[str], str]) -> None:
    """InputError for a value of another kind than its field's, as JSON or a Python caller may give it, UnknownNameError
    for a text that is none of its `Literal`. ``flag`` gives the option's name on the command line."""
    cls: Any = type(options)
    for name, kinds in _field_kinds(cls).items():
        value = getattr(options, name)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
            listed = wanted.get(kinds[0], "an object" if get_origin(kinds[0]) is dict else "a list")
            raise InputError(f"{flag(name)}: {value!r} is not {listed}")
    for name, words in _field_words(cls).items():
        value = getattr(options, name)
        if value is not None and value not in words:
            raise unknown_name(name, str(value), words)
