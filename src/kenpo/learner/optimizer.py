"""AdamW over named parameters, with float32 master weights for low-precision models. Its state is plain tensors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError, RunError

# By name in the configuration: module, class and package. Moments of 8 or 4 bits; paged ones move to the CPU when a
# GPU runs out.
OPTIMIZERS = {
    "torchao_adamw_8bit": ("torchao.optim", "AdamW8bit", "torchao"),
    "torchao_adamw_4bit": ("torchao.optim", "AdamW4bit", "torchao"),
    "bnb_adamw_8bit": ("bitsandbytes.optim", "AdamW8bit", "bitsandbytes"),
    "bnb_paged_adamw": ("bitsandbytes.optim", "PagedAdamW", "bitsandbytes"),
    "bnb_paged_adamw_8bit": ("bitsandbytes.optim", "PagedAdamW8bit", "bitsandbytes"),
}


SCALAR_HEADS = "scalar_heads."  # how a scorer names their parameters


def learning_rate(step: int, *, lr: float, warmup: int, steps: int, schedule: str = "constant") -> float:
    """The learning rate of `step` (1-based): linear warm-up to `lr`, then constant, linear or cosine towards 0."""
    if step <= warmup:
        return lr * step / warmup
    left = (steps - step + 1) / max(1, steps - warmup)  # 1 at first, above 0 at the last step
    if schedule == "linear":
        return lr * left
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return lr


@dataclass(frozen=True)
class OptimizerOptions:
    """``name`` is "adamw" or one of OPTIMIZERS, ``grad_clip`` the largest norm of a gradient (0: any); ``weight_decay``
    acts on matrices. ``scalar_rate``: the scalar heads' learning rate as a multiple of the others', since a fresh head
    has far to go."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    scalar_rate: float = 1.0


class Optimizer:
    """Updates a model's trainable parameters in place. Weight decay acts on matrices only."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], options: OptimizerOptions) -> None:
        self.named = {n: p for n, p in named if p.requires_grad}
        if not self.named:
            raise RunError("the model has no trainable parameter")
        low = (torch.bfloat16, torch.float16)
        self.masters = {n: p.detach().float().clone() for n, p in self.named.items() if p.dtype in low}
        self.grad_clip = options.grad_clip
        moved = {n: self.masters.get(n, p) for n, p in self.named.items()}
        heads = {n for n in moved if n.startswith(SCALAR_HEADS)}
        rest = {n: p for n, p in moved.items() if n not in heads}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest.values() if p.dim() >= 2], "weight_decay": options.weight_decay, "rate": 1.0},
            {"params": [p for p in rest.values() if p.dim() < 2], "weight_decay": 0.0, "rate": 1.0},
            {"params": [moved[n] for n in sorted(heads)], "weight_decay": 0.0, "rate": options.scalar_rate,
             "scalar": True},
        ]  # fmt: skip
        self.inner = _make(options.name, [g for g in groups if g["params"]], options.betas)
        self._moved = moved

    def parameters(self) -> list[Tensor]:
        """What is updated, and holds the gradients that `collect` gathered, in a fixed order."""
        return list(self._moved.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in (*self.named.values(), *self.masters.values()):
            p.grad = None

    def collect(self) -> None:
        """Move the gradients of low-precision parameters into their masters' float32 ones, after every microbatch: a
        sum in bf16 would depend on how the minibatch was cut."""
        for name, master in self.masters.items():
            found, self.named[name].grad = self.named[name].grad, None
            if found is not None:
                master.grad = found.float() if master.grad is None else master.grad.add_(found)

    def step(self, lr: float | None, scalar_lr: float | None = None) -> float:
        """Clip the gradient, take one step at rate `lr`; returns the gradient's norm before clipping.

        `scalar_lr` is the scalar heads' rate (None: ``scalar_rate`` times `lr`). Without `lr` they move alone: the
        other parameters, their moments and their step counts stay, and the norm is that of the heads.
        A parameter without gradient is treated as having gradient 0. Raises `RunError`, leaving the parameters as they
        are, if the norm is not finite.
        """
        self.collect()
        moved = self.parameters()
        if lr is None:
            moved = self._moving_heads_alone()
        for p in moved:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = torch.nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            raise RunError(
                f"the gradient's norm is {float(norm)}: nothing was updated; lower --lr or look at the recorded batch"
            )
        if self.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(moved, self.grad_clip, norm)
        for group in self.inner.param_groups:
            rate = (lr or 0.0) * group.get("rate", 1.0)
            if group.get("scalar") and scalar_lr is not None:
                rate = scalar_lr
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.inner.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.named[name].copy_(master)
                master.grad = None
        return float(norm)

    def _moving_heads_alone(self) -> list[Tensor]:
        """The scalar heads' parameters; the others lose their gradient, and an optimizer leaves those as they are."""
        for name, p in self._moved.items():
            if not name.startswith(SCALAR_HEADS):
                p.grad = None
        return [p for n, p in self._moved.items() if n.startswith(SCALAR_HEADS)]

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights by parameter name."""
        tensors = dict(self._exact())
        for name, p in self._moved.items():
            for key, value in self.inner.state.get(p, {}).items():
                if hasattr(value, "__tensor_flatten__"):  # a quantized moment: its parts
                    tensors |= {f"{key}:{part}.{name}": getattr(value, part) for part in value.__tensor_flatten__()[0]}
                else:
                    tensors[f"{key}.{name}"] = torch.as_tensor(value)
        return {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}

    def _exact(self) -> Iterator[tuple[str, Tensor]]:
        """What a model folder of one low precision can't hold: master weights, and float32 weights beside them."""
        if self.masters:
            yield from ((f"master.{n}", p) for n, p in self._moved.items())

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up a state that `state` gave. RunError if it belongs to other parameters or another optimizer."""
        with torch.no_grad():
            for name, exact in self._exact():
                exact.copy_(tensors[name])
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if kind != "master" and name in self._moved:
                found.setdefault(name, {})[kind] = value
        for name, p in self._moved.items():
            if name in found:
                self.inner.state[p] = self._restored(name, p, found[name])

    def _restored(self, name: str, p: Tensor, found: dict[str, Tensor]) -> dict[str, Any]:
        """One parameter's state as the optimizer itself would hold it."""
        probe = _first_state(self.inner, p)
        wanted = {
            f"{k}:{part}" if part else k
            for k, v in probe.items()
            for part in (v.__tensor_flatten__()[0] if hasattr(v, "__tensor_flatten__") else ("",))
        }
        if wanted != found.keys():
            raise RunError(f"the checkpoint's optimizer state does not fit parameter {name}")
        restored: dict[str, Any] = {}
        for key, fresh in probe.items():
            if hasattr(fresh, "__tensor_flatten__"):
                parts, context = fresh.__tensor_flatten__()
                inner = {part: found[f"{key}:{part}"].to(getattr(fresh, part)) for part in parts}
                restored[key] = type(fresh).__tensor_unflatten__(inner, context, fresh.shape, fresh.stride())
                continue
            value = found[key]
            if not isinstance(fresh, Tensor):
                restored[key] = type(fresh)(value.item())
                continue
            if value.shape != fresh.shape:
                raise RunError(f"the checkpoint's optimizer state does not fit parameter {name}")
            restored[key] = value.to(device=fresh.device, dtype=fresh.dtype, copy=True)
        return restored


def _first_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any]:
    """What the optimizer holds for a parameter like `p` after a first step: names, kinds, shapes and dtypes."""
    twin = torch.nn.Parameter(torch.zeros_like(p))
    twin.grad = torch.zeros_like(p)
    group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
    kept = optimizer.param_groups
    try:
        optimizer.param_groups = [{**group, "params": [twin]}]
        optimizer.step()
    finally:
        optimizer.param_groups = kept
    return dict(optimizer.state.pop(twin))


def _make(name: str, groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    """The optimizer of that name. InputError with the line that installs it."""
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas)
    module, kind, package = OPTIMIZERS[name]
    try:
        made = getattr(importlib.import_module(module), kind)
    except ImportError:
        raise InputError(f"--optimizer {name} needs {package}, which is not installed; pip install {package}") from None
    return made(groups, lr=0.0, betas=betas)
