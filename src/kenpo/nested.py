"""State of algorithms and sources as a file pair: what is JSON stays JSON, tensors go into a safetensors file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kenpo.errors import InputError

MARK = "$tensor"


def split(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """`state`, nested dicts and lists of JSON values and tensors, as (JSON value, its tensors by name).

    Each tensor's place holds ``{"$tensor": its name}``, which starts with `name`. Tuples become lists. InputError for
    a key that is no string or is ``$tensor``, and for a value that is neither JSON nor a tensor.
    """
    if isinstance(state, Tensor):
        return {MARK: name}, {name: state.detach().cpu().contiguous()}
    if isinstance(state, dict):
        bad = next((k for k in state if not isinstance(k, str) or k == MARK), None)
        if bad is not None:
            raise InputError(f"state {name}: the key {bad!r} can't be saved; keys are strings other than {MARK!r}")
        pairs = {k: split(v, f"{name}.{k}") for k, v in state.items()}
        return {k: plain for k, (plain, _) in pairs.items()}, {
            n: t for _, found in pairs.values() for n, t in found.items()
        }
    if isinstance(state, list | tuple):
        items = [split(v, f"{name}.{i}") for i, v in enumerate(state)]
        return [plain for plain, _ in items], {n: t for _, found in items for n, t in found.items()}
    if state is None or isinstance(state, str | int | float):
        return state, {}
    raise InputError(f"state {name}: a {type(state).__name__} can't be saved; JSON values and tensors can")


def join(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """What `split` took apart; every tensor is a copy of its own. KeyError for a tensor that is missing."""
    if isinstance(plain, dict):
        if plain.keys() == {MARK}:
            return tensors[plain[MARK]].clone()
        return {k: join(v, tensors) for k, v in plain.items()}
    return [join(v, tensors) for v in plain] if isinstance(plain, list) else plain
