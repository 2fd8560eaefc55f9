"""Settings: the numbers of an algorithm by dotted key, and what differs between two algorithms.

``slot.field`` for a single stage, ``slot.stage_name.field`` in a tuple slot, further dots for nested stages
(``ratio.bound.low``). A tuple slot may be set to ``[]`` as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kenpo.errors import InputError, unknown_name
from kenpo.stages.base import Stage, snake

if TYPE_CHECKING:
    from kenpo.algorithm import Algorithm


def _fields(stage: Stage, prefix: str) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(stage):
        value = getattr(stage, f.name)
        if isinstance(value, Stage):
            yield from _fields(value, f"{prefix}.{f.name}")
        else:
            yield f"{prefix}.{f.name}", value


def _slots(a: Algorithm) -> Iterator[tuple[str, Stage]]:
    """(key prefix, stage) of every stage: ``surrogate`` or ``weights.second_moment``."""
    for slot in a.SLOTS:
        value = getattr(a, slot)
        if isinstance(value, tuple):
            yield from ((f"{slot}.{snake(s)}", s) for s in value)
        elif value is not None:
            yield slot, value


def flat_settings(a: Algorithm) -> dict[str, Any]:
    """Every number of every stage by dotted key."""
    return {key: value for prefix, stage in _slots(a) for key, value in _fields(stage, prefix)}


def _changed(stage: Stage, prefix: str, settings: Mapping[str, Any]) -> Stage:
    """`stage` with the settings below `prefix` applied, nested stages first."""
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(stage):
        key = f"{prefix}.{f.name}"
        value = getattr(stage, f.name)
        if key in settings:
            changes[f.name] = settings[key]
        elif isinstance(value, Stage) and (new := _changed(value, key, settings)) is not value:
            changes[f.name] = new
    if not changes:
        return stage
    try:
        return dataclasses.replace(stage, **changes)
    except InputError as error:
        keys = ", ".join(f"{prefix}.{n}" for n in changes)
        raise InputError(f"setting {keys}: {error}") from None


def apply_settings(a: Algorithm, settings: Mapping[str, Any], *, tuple_slots: Iterable[str]) -> Algorithm:
    """`a` with all settings applied together. See `Algorithm.with_settings`."""
    known = flat_settings(a)
    slots: dict[str, Any] = {}
    for key, value in settings.items():
        if key in tuple_slots:
            if value not in ([], ()):
                raise InputError(f"setting {key!r}: a tuple slot can only be emptied ([]); add stages with --with NAME")
            slots[key] = ()
        elif key not in known and not _is_nested(a, key):
            raise unknown_name(f"setting of {a.name}", key, [*known, *tuple_slots])
    for slot in a.SLOTS:
        value = slots.get(slot, getattr(a, slot))
        if isinstance(value, tuple):
            slots[slot] = tuple(_changed(s, f"{slot}.{snake(s)}", settings) for s in value)
        elif value is not None:
            slots[slot] = _changed(value, slot, settings)
    lost = [k for k in settings if k.split(".")[0] in slots and slots[k.split(".")[0]] == () and "." in k]
    if lost:
        raise InputError(f"setting {lost[0]!r} has no effect: the slot is emptied by another setting")
    return a.but(**slots)


def _is_nested(a: Algorithm, key: str) -> bool:
    """Whether `key` names a field that holds a nested stage (settable to null only)."""
    return any(key == f"{p}.{f.name}" for p, s in _slots(a) for f in dataclasses.fields(s))


def differences(a: Algorithm, b: Algorithm) -> dict[str, tuple[Any, Any]]:
    """What differs, by slot: numbers where the stages are of one class, whole stages where they are not."""
    ours, theirs = dict(_slots(a)), dict(_slots(b))
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        x, y = ours.get(key), theirs.get(key)
        if x == y:
            continue
        if type(x) is type(y) and isinstance(x, Stage) and isinstance(y, Stage):
            found.update(_stage_differences(x, y, key))
        else:
            found[key] = (x, y)
    if a.updates != b.updates:
        found["updates"] = (a.updates, b.updates)
    return found


def _stage_differences(x: Stage, y: Stage, prefix: str) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(x):
        u, v, key = getattr(x, f.name), getattr(y, f.name), f"{prefix}.{f.name}"
        if u == v:
            continue
        if isinstance(u, Stage) and type(u) is type(v):
            found.update(_stage_differences(u, v, key))
        else:
            found[key] = (u, v)
    return found
