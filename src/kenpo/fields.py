"""The named tensor fields of a batch: axes, kinds and padding of each, and what holds some of them together.

Axes: ``B`` rollouts, ``T`` token positions, ``K`` experts per token (or top-K ids), ``L`` mixture-of-experts layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from kenpo.errors import InputError


class FieldSpec(NamedTuple):
    """Axes (a string of B, T, K, L), kind of number, and what stands in padding when a batch is widened."""

    axes: str
    kind: str  # "float" | "int" | "bool"
    pad: float = 0


#: Rows of a batch: an index tensor, a bool mask, a list of places, or a slice.
Rows: TypeAlias = Tensor | Sequence[int] | slice

#: Which Rollouts field holds the log-probs of each anchor.
ANCHORS = {"old": "logp_old", "sampler": "logp_sampler", "guided": "logp_guided", "prox": "logp_prox"}

#: Values of ``rollouts.origin``: who wrote the response. A supervised row has no reward.
ON_POLICY, REPLAYED, EXPERT, REPHRASED, SUPERVISED = range(5)

ROLLOUT_FIELDS: dict[str, FieldSpec] = {
    "mask": FieldSpec("BT", "bool"),
    "group": FieldSpec("B", "int"),
    "rewards": FieldSpec("B", "float"),
    "tokens": FieldSpec("BT", "int", -1),
    "prompt_id": FieldSpec("B", "int"),
    "prefix": FieldSpec("B", "int"),
    "token_rewards": FieldSpec("BT", "float"),
    "answer": FieldSpec("B", "int"),
    "baseline": FieldSpec("B", "float"),
    "logp_sampler": FieldSpec("BT", "float"),
    "logp_old": FieldSpec("BT", "float"),
    "logp_ref": FieldSpec("BT", "float"),
    "logp_teacher": FieldSpec("BT", "float"),
    "values_old": FieldSpec("BT", "float"),
    "score_old": FieldSpec("B", "float"),
    "margin": FieldSpec("B", "float"),
    "drift": FieldSpec("B", "float"),
    "logp_guided": FieldSpec("BT", "float"),
    "logp_prox": FieldSpec("BT", "float"),
    "logp_source": FieldSpec("B", "float"),
    "topk_ids": FieldSpec("BTK", "int", -1),
    "topk_logp_sampler": FieldSpec("BTK", "float"),
    "topk_logp_old": FieldSpec("BTK", "float"),
    "support_ids": FieldSpec("BTK", "int", -1),
    "prompt_mask": FieldSpec("BT", "bool"),
    "policy_version": FieldSpec("BT", "int", -1),
    "origin": FieldSpec("B", "int"),
    "trajectory": FieldSpec("B", "int"),
    "target_ids": FieldSpec("BK", "int", -1),
    "target_prob": FieldSpec("BK", "float"),
    "truncated": FieldSpec("B", "bool"),
    "hinted": FieldSpec("B", "bool"),
    "turn": FieldSpec("BT", "int"),
    "routes": FieldSpec("BTLK", "int", -1),
    "router_logp_old": FieldSpec("BTLK", "float"),
}

#: Ids of another prompt for the same response, under a name of their own in ``rollouts.contexts``.
CONTEXT = FieldSpec("BP", "int", -1)

POLICY_FIELDS: dict[str, FieldSpec] = {
    "logp": FieldSpec("BT", "float"),
    "entropy": FieldSpec("BT", "float"),
    "values": FieldSpec("BT", "float"),
    "score": FieldSpec("B", "float"),
    "topk_logp": FieldSpec("BTK", "float"),
    "kl_ref": FieldSpec("BT", "float"),
    "kl_sampler": FieldSpec("BT", "float"),
    "kl_teacher": FieldSpec("BT", "float"),
    "router_logp": FieldSpec("BTLK", "float"),
}


def checked(name: str, value: Any, spec: FieldSpec, batch: int, width: int) -> Tensor:
    """`value` as a tensor of the kind and shape that `spec` asks for, or an error that names the field."""
    x = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if x.dim() != len(spec.axes):
        raise InputError(f"{name}: expected {len(spec.axes)} axes [{','.join(spec.axes)}], got shape {list(x.shape)}")
    for axis, size in zip(spec.axes, x.shape, strict=True):
        wanted = {"B": batch, "T": width}.get(axis, size)
        if size != wanted:
            raise InputError(f"{name}: shape {list(x.shape)} does not fit the mask's [B={batch}, T={width}]")
    if spec.kind == "bool" and x.dtype != torch.bool:
        if not bool(((x == 0) | (x == 1)).all()):
            raise InputError(f"{name}: holds values other than 0 and 1; pass a 0/1 or bool tensor")
        return x.bool()
    if spec.kind == "int":
        if x.dtype.is_floating_point or x.dtype == torch.bool:
            raise InputError(f"{name}: expected integers, got {x.dtype}")
        return x
    if spec.kind == "float" and not x.dtype.is_floating_point:
        return x.to(torch.get_default_dtype())
    return x


class Fields:
    """What Rollouts and Policy share: named tensors that can be indexed by row, moved, and replaced together."""

    _specs: Mapping[str, FieldSpec]

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are present, by name."""
        return {n: v for n in self._specs if (v := getattr(self, n, None)) is not None}

    def __getitem__(self, rows: Rows) -> Self:
        """The same batch with `rows` only: an index tensor, a list, a bool mask or a slice."""
        rows = as_index(rows)
        return self._each(lambda v: v[rows])

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced; shapes are checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """A copy with every tensor on another device; nothing changes its dtype."""
        device = device_of(*args, **kwargs)
        return self._each(lambda v: v.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor changed alike. What has been checked is not checked again."""
        made = copy.copy(self)
        for name, value in self.tensors().items():
            object.__setattr__(made, name, change(value))
        return made


def as_index(rows: Rows) -> Tensor | slice:
    """`rows` as what a tensor can be indexed with."""
    if isinstance(rows, Tensor | slice):
        return rows
    places = torch.as_tensor(list(rows))
    return places if places.numel() else places.long()


def device_of(*args: Any, **kwargs: Any) -> torch.device:
    """The device that the arguments of ``tensor.to`` name."""
    return torch.empty(0).to(*args, **kwargs).device
