"""Options that are read as lists of words: settings of stages, stages to append, verifiers with weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from kenpo.errors import InputError


def parse_settings(items: Sequence[str]) -> dict[str, Any]:
    """``["surrogate.high=0.3"]`` as ``{"surrogate.high": 0.3}``; what is not JSON is taken as text.

    InputError for a pair without '=' or key, and for a key given twice.
    """
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"--set takes SLOT.FIELD=VALUE, for example surrogate.high=0.3; got {item!r}")
        if key in settings:
            raise InputError(f"--set: {key} is given twice")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


Settings = Annotated[
    dict[str, Any] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="SLOT.FIELD=VALUE",
        instance_from_str=parse_settings,
        is_instance=lambda x: x is None or isinstance(x, dict),
        str_from_instance=lambda d: [f"{k}={json.dumps(v)}" for k, v in (d or {}).items()],
    ),
    tyro.conf.arg(name="set"),
]
Stages = Annotated[tuple[str, ...], tyro.conf.arg(name="with", metavar="STAGE")]


def parse_verifiers(items: Sequence[str]) -> str | tuple[str, ...]:
    """One verifier as its name, several as a tuple. InputError for none."""
    if not items:
        raise InputError("--verifier: name at least one, or leave the option out for the task's own")
    return items[0] if len(items) == 1 else tuple(items)


VerifierSpec = Annotated[
    str | tuple[str, ...] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="VERIFIER[=WEIGHT]",
        instance_from_str=parse_verifiers,
        is_instance=lambda x: x is None or isinstance(x, str | tuple),
        str_from_instance=lambda x: [x] if isinstance(x, str) else list(x or ()),
    ),
]
