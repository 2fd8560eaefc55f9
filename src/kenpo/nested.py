"""State of algorithms and sources as a file pair: what is JSON stays JSON, tensors go into a safetensors file."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kenpo.errors import InputError

MARK = "$tensor"


def split(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """`state`, nested dicts and lists of JSON values and tensors, as (JSON value, its tensors by name).

    Each tensor's place holds ``{"$tensor": its name}``, which starts with `name`; the tensor is a copy. Tuples become
    lists. InputError for a key that is no string or is ``$tensor``, and for a value that is neither JSON nor a tensor
    (NaN and infinities are no JSON: they can stand in a tensor).
    """
    if isinstance(state, Tensor):
        return {MARK: name}, {name: state.detach().cpu().contiguous().clone()}
    if isinstance(state, dict):
        bad = next((k for k in state if not isinstance(k, str) or k == MARK), None)
        if bad is not None:
            raise InputError(f"state {name}: the key {bad!r} can't be saved; keys are strings other than {MARK!r}")
        pairs = {k: split(v, f"{name}.{_escaped(k)}") for k, v in state.items()}
        return {k: plain for k, (plain, _) in pairs.items()}, {
            n: t for _, found in pairs.values() for n, t in found.items()
        }
    if isinstance(state, list | tuple):
        items = [split(v, f"{name}.{i}") for i, v in enumerate(state)]
        return [plain for plain, _ in items], {n: t for _, found in items for n, t in found.items()}
    if isinstance(state, float) and not math.isfinite(state):
        raise InputError(f"state {name}: {state} is no JSON number; keep it in a tensor")
    if state is None or isinstance(state, str | int | float):
        return state, {}
    raise InputError(f"state {name}: a {type(state).__name__} can't be saved; JSON values and tensors can")


def _escaped(key: str) -> str:
    """`key` without a dot, so that no two places of a state have one name."""
    return key.replace("~", "~0").replace(".", "~1")


def join(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """What `split` took apart; every tensor is a copy of its own. KeyError for a tensor that is missing."""
    if isinstance(plain, dict):
        if plain.keys() == {MARK}:
            return tensors[plain[MARK]].clone()
        return {k: join(v, tensors) for k, v in plain.items()}
    return [join(v, tensors) for v in plain] if isinstance(plain, list) else plain
