"""Rollouts as files: one safetensors file per batch, every field under its own name. Also the joining of batches."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.fields import CONTEXT
from kenpo.types import ROLLOUT_FIELDS, Rollouts

_NAMED = ("reward_parts", "contexts")  # fields that hold tensors by name: in a file, field.name


def _tensors(rollouts: Rollouts) -> dict[str, Tensor]:
    named = {f"{field}.{n}": v for field in _NAMED for n, v in getattr(rollouts, field).items()}
    named = {**rollouts.tensors(), **named}
    return {n: v.detach().cpu().contiguous() for n, v in named.items()}


def _from_tensors(tensors: dict[str, Tensor]) -> Rollouts:
    fields = {n: v for n, v in tensors.items() if n in ROLLOUT_FIELDS}
    parts, contexts = (
        {n.removeprefix(f"{field}."): v for n, v in tensors.items() if n.startswith(f"{field}.")} for field in _NAMED
    )
    return Rollouts(**fields, reward_parts=parts, contexts=contexts)


def to_bytes(rollouts: Rollouts, info: dict | None = None) -> bytes:
    """`rollouts` in safetensors' format; `info`, a JSON-able dict, goes into the file's header."""
    from safetensors.torch import save

    return save(_tensors(rollouts), metadata={"kenpo": json.dumps(info or {})})


def from_bytes(data: bytes) -> Rollouts:
    """What `to_bytes` packed."""
    from safetensors.torch import load

    return _from_tensors(load(data))


def save_rollouts(path: str | os.PathLike[str], rollouts: Rollouts, info: dict | None = None) -> None:
    """Write one batch, atomically: the file is whole or absent. OSError if the disk refuses."""
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(to_bytes(rollouts, info))
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_rollouts(path: str | os.PathLike[str]) -> Rollouts:
    """Read one recorded batch. InputError if the file is missing, is not safetensors, or lacks a required field."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a safetensors file ({error})") from None
    missing = [n for n in ("mask", "group", "rewards") if n not in tensors]
    if missing:
        raise InputError(f"{path}: not a recorded batch, it lacks {', '.join(missing)}")
    return _from_tensors(tensors)


def concatenate(batches: Sequence[Rollouts]) -> Rollouts:
    """The rows of all batches in order, widened to the longest and padded on the right with each field's padding value.

    Group numbers are taken as they are; a reward part that a batch lacks is NaN there, a context is absent. InputError
    for batches whose fields differ, or for none at all.
    """
    if not batches:
        raise InputError("no batches to join")
    if len(batches) == 1:
        return batches[0]
    names = list(batches[0].tensors())
    for other in batches[1:]:
        if set(other.tensors()) != set(names):
            raise InputError("batches with different fields can't be joined")
    fields = {n: _join([getattr(b, n) for b in batches], ROLLOUT_FIELDS[n].pad) for n in names}
    named = dict.fromkeys(n for b in batches for n in b.reward_parts)
    parts = {
        n: torch.cat([b.reward_parts.get(n, torch.full_like(b.rewards, torch.nan)) for b in batches]) for n in named
    }
    absent = [torch.full((len(b), 0), CONTEXT.pad, dtype=torch.int64, device=b.mask.device) for b in batches]
    contexts = {
        n: _join([b.contexts.get(n, none) for b, none in zip(batches, absent, strict=True)], CONTEXT.pad)
        for n in dict.fromkeys(n for b in batches for n in b.contexts)
    }
    return Rollouts(**fields, reward_parts=parts, contexts=contexts)


def _join(tensors: Sequence[Tensor], pad: float) -> Tensor:
    """Concatenate along rows, padding every further axis at its end to the largest size."""
    sizes = [max(t.shape[axis] for t in tensors) for axis in range(1, tensors[0].dim())]
    widened = []
    for t in tensors:
        if list(t.shape[1:]) == sizes:
            widened.append(t)
            continue
        wide = t.new_full((t.shape[0], *sizes), pad)
        wide[tuple(slice(0, n) for n in t.shape)] = t
        widened.append(wide)
    return torch.cat(widened)
