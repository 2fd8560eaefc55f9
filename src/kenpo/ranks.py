"""Several processes as one: the objective's mathematics is replicated; sampling, scoring and model passes are shared.

Every rank holds the whole batch and runs `prepare` and `weigh` on it; each runs the model on its share of the rows.
Gradients are added (never averaged) in exactly one place, `Ranks.add_gradients`. A single process is the same code with
nothing to exchange. Exchanged objects travel as safetensors or JSON bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenpo.batches import concatenate, from_bytes, to_bytes
from kenpo.errors import InputError
from kenpo.types import Rollouts


def among() -> tuple[int, int]:
    """(rank, number of processes) by the environment, as torchrun sets it; (0, 1) for a process of its own.

    RANK alone, as some schedulers leave it behind, makes no group. Raises `InputError` for several processes without
    all that they need to meet, and for what is no number.
    """
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size is None or size == 1:
        return 0, 1
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(n)]
    if missing:
        raise InputError(
            f"WORLD_SIZE={size} asks for several processes, but {' and '.join(missing)} is not set; start them with "
            "torchrun, or unset WORLD_SIZE"
        )
    if rank is None or not 0 <= rank < size:
        raise InputError(f"RANK={rank} is no place among WORLD_SIZE={size} processes; start them with torchrun")
    return rank, size


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name}={text!r} in the environment is no whole number; unset it") from None


class Ranks:
    """This process's place among the processes of a run."""

    def __init__(self, rank: int = 0, size: int = 1, owns_group: bool = False) -> None:
        self.rank, self.size, self._owns_group = rank, size, owns_group

    @classmethod
    def start(cls, device: str = "cpu") -> Ranks:
        """Join the processes that torchrun started; a single rank where it did not."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        if among()[1] == 1:
            return cls()
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), owns_group=True)

    def close(self) -> None:
        """Leave the group that `start` joined."""
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False

    @property
    def first(self) -> bool:
        """True on the one rank that writes, prints and saves."""
        return self.rank == 0

    @property
    def local(self) -> int:
        """This rank's number on its own machine."""
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def share(self, n: int) -> range:
        """This rank's contiguous part of ``range(n)``: all ranks' parts in a row give the order of one process."""
        return range(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks."""
        if self.size == 1:
            return [data]
        mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        longest = max(1, max(int(s) for s in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [bytes(e[: int(s)].numpy()) for e, s in zip(everyone, sizes, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in the order of ranks."""
        if self.size == 1:
            return [value]
        return [json.loads(b) for b in self.gather_bytes(json.dumps(value).encode())]

    def gather_list(self, values: list) -> list:
        """The ranks' lists of JSON values as one list."""
        return [v for part in self.gather(values) for v in part]

    def from_first(self, value: Any) -> Any:
        """The JSON value that rank 0 holds."""
        return self.gather(value)[0]

    def gather_rollouts(self, mine: Rollouts | None) -> Rollouts:
        """The rows of all ranks in the order of ranks; a rank without rows hands in None."""
        if self.size == 1:
            assert mine is not None
            return mine
        packed = self.gather_bytes(b"" if mine is None else to_bytes(mine))
        return concatenate([from_bytes(p) for p in packed if p])

    def combine_rows(self, rows: Sequence[int], values: Tensor) -> Tensor:
        """A [B,…] tensor of which each rank filled its own `rows` (the others zero), whole on every rank."""
        if self.size == 1:
            return values
        whole = torch.zeros_like(values, device="cpu")
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        whole[index] = values.cpu()[index]
        dist.all_reduce(whole, op=dist.ReduceOp.SUM)
        return whole.to(values.device)

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add every parameter's gradient over the ranks, in place. The only place where gradients meet."""
        if self.size == 1:
            return
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
