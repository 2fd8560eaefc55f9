"""Options that are read as lists of words: settings of stages, stages to append, verifiers with weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from kenpo.errors import InputError


def parse_settings(
    items: Sequence[str], option: str = "--set", shape: str = "SLOT.FIELD=VALUE, for example surrogate.high=0.3"
) -> dict[str, Any]:
    """``["surrogate.high=0.3"]`` as ``{"surrogate.high": 0.3}``; what is not JSON is taken as text.

    InputError for a pair without '=' or key, and for a key given twice.
    """
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"{option} takes {shape}; got {item!r}")
        if key in settings:
            raise InputError(f"{option}: {key} is given twice")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def _pairs(metavar: str, read: Callable[[Sequence[str]], dict[str, Any]]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda x: x is None or isinstance(x, dict),
        str_from_instance=lambda d: [f"{k}={json.dumps(v)}" for k, v in (d or {}).items()],
    )


def _template_args(items: Sequence[str]) -> dict[str, Any]:
    return parse_settings(items, "--template-args", "NAME=VALUE, for example enable_thinking=false")


Settings = Annotated[dict[str, Any] | None, _pairs("SLOT.FIELD=VALUE", parse_settings), tyro.conf.arg(name="set")]
TemplateArgs = Annotated[dict[str, Any] | None, _pairs("NAME=VALUE", _template_args)]
Stages = Annotated[tuple[str, ...], tyro.conf.arg(name="with", metavar="STAGE")]


def _one_or_several(metavar: str, empty: str) -> PrimitiveConstructorSpec[Any]:
    """Words after one option: one as a text, several as a tuple. ``empty`` is said where there is none."""

    def read(items: Sequence[str]) -> str | tuple[str, ...]:
        if not items:
            raise InputError(empty)
        return items[0] if len(items) == 1 else tuple(items)

    return PrimitiveConstructorSpec(
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
