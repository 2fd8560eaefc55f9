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


def _one_or_several(metavar: str, empty: str) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """Words after one option: one as a text, several as a tuple. ``empty`` is said where there is none."""

    def read(items: Sequence[str]) -> str | tuple[str, ...]:
        if not items:
            raise InputError(empty)
        return items[0] if len(items) == 1 else tuple(items)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda x: x is None or isinstance(x, str | tuple),
        str_from_instance=lambda x: [x] if isinstance(x, str) else list(x or ()),
    )


_NO_VERIFIER = "--verifier: name at least one, or leave the option out for the task's own"
VerifierSpec = Annotated[str | tuple[str, ...] | None, _one_or_several("VERIFIER[=WEIGHT]", _NO_VERIFIER)]
TaskSpec = Annotated[str | tuple[str, ...], _one_or_several("TASK|FILE", "--task: name one")]
FilesSpec = Annotated[str | tuple[str, ...] | None, _one_or_several("FILE", "--eval-file: name at least one file")]


def listed(spec: str | Sequence[str] | None) -> str:
    """One or several as messages name them."""
    return spec if isinstance(spec, str) else " + ".join(spec or ())
