"""Parsing shared by the commands: tyro for the options, `slot.field=value` for settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import tyro

from kenpo.errors import InputError

T = TypeVar("T")


def parse(cls: type[T], command: str, argv: list[str]) -> T:
    """`argv` as the options dataclass `cls`. ``--help`` and malformed options end the process as argparse does (0,
    2)."""
    return tyro.cli(cls, prog=f"kenpo {command}", args=argv, description=cls.__doc__)


def settings_from(pairs: Iterable[str]) -> dict[str, Any]:
    """``["surrogate.high=0.3"]`` as ``{"surrogate.high": 0.3}``; values are JSON, or text where they are not.

    Raises `InputError` for a pair without "=" or an empty key, and for a key given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise InputError(f"setting {pair!r}: expected SLOT.FIELD=VALUE, e.g. surrogate.high=0.3")
        if key.strip() in found:
            raise InputError(f"setting {key.strip()!r} is given twice")
        try:
            found[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            found[key.strip()] = text
    return found
