"""AdamW over named parameters, with float32 master weights for low-precision models. Its state is plain tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kenpo.errors import RunError
from kenpo.trainer.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of `step` (1-based): linear warm-up to ``lr``, then constant, linear or cosine towards 0."""
    assert config.lr is not None
    assert config.warmup is not None
    assert config.steps is not None
    if step <= config.warmup:
        return config.lr * step / config.warmup
    left = (config.steps - step + 1) / max(1, config.steps - config.warmup)  # 1 at first, above 0 at the last step
    if config.schedule == "linear":
        return config.lr * left
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return config.lr


class Optimizer:
    """Updates a model's trainable parameters in place. Weight decay acts on matrices only."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise RunError("the model has no trainable parameter")
        low = (torch.bfloat16, torch.float16)
        self.masters = {n: p.detach().float().clone() for n, p in self.named.items() if p.dtype in low}
        self.grad_clip = config.grad_clip
        moved = {n: self.masters.get(n, p) for n, p in self.named.items()}
        groups = [
            {"params": [p for p in moved.values() if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in moved.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        assert config.betas is not None
        self.inner = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=config.betas)
        self._moved = moved

    def parameters(self) -> list[torch.nn.Parameter]:
        """The model's trainable parameters, in a fixed order."""
        return list(self.named.values())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in self.named.values():
            p.grad = None

    def step(self, lr: float) -> float:
        """Clip the gradient, take one step at rate `lr`; returns the gradient's norm before clipping.

        A parameter without gradient is treated as having gradient 0. Raises `RunError`, leaving the parameters as they
        are, if the norm is not finite.
        """
        for name, p in self.named.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if name in self.masters:
                self.masters[name].grad = p.grad.float()
        moved = list(self._moved.values())
        norm = torch.nn.utils.get_total_norm([p.grad for p in moved if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            raise RunError(
                f"the gradient's norm is {float(norm)}: nothing was updated; lower --lr or look at the recorded batch"
            )
        if self.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(moved, self.grad_clip, norm)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.named[name].copy_(master)
                master.grad = None
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights by parameter name."""
        tensors = {f"master.{n}": m for n, m in self.masters.items()}
        for name, p in self._moved.items():
            for key, value in self.inner.state.get(p, {}).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(value)
        return {n: t.detach().cpu().contiguous() for n, t in tensors.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up a state that `state` gave. RunError if it belongs to other parameters."""
        for name, p in self._moved.items():
            found = {k: tensors[f"{k}.{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in tensors}
            if found and (len(found) != 3 or found["exp_avg"].shape != p.shape):
                raise RunError(f"the checkpoint's optimizer state does not fit parameter {name}")
            if name in self.masters:
                with torch.no_grad():
                    self.masters[name].copy_(tensors[f"master.{name}"])
            if found:
                self.inner.state[p] = {
                    k: v.clone() if k == "step" else v.to(device=p.device, dtype=p.dtype) for k, v in found.items()
                }
