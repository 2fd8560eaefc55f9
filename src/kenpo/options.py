"""What groups of options are made of: their limits, their paths, and how lists of words after an option are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from kenpo.errors import InputError

Limits = Mapping[str, float]
"""Option -> the least that it may be."""
Paths = Mapping[str, Callable[[str], str]]
"""Option -> what makes a path in it whole; what is no path it leaves."""


@dataclass(frozen=True)
class Options:
    """A group of options, declared where its subject lives. A run's configuration is made of such groups.

    A field is an option, the string under it its help. None: filled from the usual values when a run is resolved.
    """

    LIMITS: ClassVar[Limits] = {}
    PATHS: ClassVar[Paths] = {}

    def check(self) -> None:
        """InputError for what the limits don't say: values that exclude each other, or have no effect."""


def check_groups(options: Options) -> None:
    """InputError for a value outside its group's limits, or that its group's `check` refuses."""
    groups = [group for group in type(options).__mro__ if "LIMITS" in vars(group)]
    for group in groups:
        for name, least in vars(group)["LIMITS"].items():
            value = getattr(options, name)
            if value is not None and not value >= least:
                raise InputError(f"{flag(name)}: {value} is below the least allowed, {least}")
    for group in type(options).__mro__:
        if "check" in vars(group):
            vars(group)["check"](options)


def whole_paths(options: Options) -> dict[str, Any]:
    """{option: value} for every option whose paths become other texts when they are made whole."""
    changes = {}
    for group in type(options).__mro__:
        for name, whole in vars(group).get("PATHS", {}).items():
            given = getattr(options, name)
            several = tuple(map(whole, given)) if isinstance(given, tuple) else given and whole(given)
            if several != given:
                changes[name] = several
    return changes


def check_share(options: Options, *names: str) -> None:
    """InputError for one of these options that is no share."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value <= 1:
            raise InputError(f"{flag(name)}: {value} is not a share between 0 and 1")


def flag(name: str) -> str:
    """The option that sets a field."""
    return "--" + {"settings": "set", "stages": "with"}.get(name, name).replace("_", "-")


def absolute(path: str) -> str:
    """A path that opens from any working folder; `~` is the user's folder."""
    return str(Path(path).expanduser().absolute())


def code_path(spec: str) -> str:
    """FILE.py:NAME with the file's whole path, and what stands behind it (=WEIGHT); model:FOLDER likewise. Other names
    stay."""
    if spec.startswith("model:"):
        return "model:" + absolute(spec.removeprefix("model:"))
    file, colon, name = spec.partition(".py:")
    return absolute(file + ".py") + ":" + name if colon else spec


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
ScheduleSpec = Annotated[
    str | tuple[str, ...], _one_or_several("COURSE|KEY=FROM:TO@STEPS", "--schedule: name a course")
]


def listed(spec: str | Sequence[str] | None) -> str:
    """One or several as messages name them."""
    return spec if isinstance(spec, str) else " + ".join(spec or ())
