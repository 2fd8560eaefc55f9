"""Gradients of low-precision parameters add up in float32, however many microbatches they come in."""

from __future__ import annotations

import pytest
import torch

from kenpo.learner.optimizer import Optimizer, OptimizerOptions


def made(dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    return model, Optimizer(model.named_parameters(), OptimizerOptions(grad_clip=0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_small_gradients_are_not_rounded_away(dtype):
    model, optimizer = made(dtype)
    optimizer.zero_grad()
    for _ in range(600):  # a sum in bf16 stops growing at 256
        model.weight.grad = (model.weight.grad if model.weight.grad is not None else 0) + torch.ones_like(model.weight)
        optimizer.collect()
    assert optimizer.step(0.0) == pytest.approx(600 * 6**0.5)


def test_a_step_forgets_what_it_used():
    model, optimizer = made(torch.bfloat16)
    for value in (1.0, 2.0):
        optimizer.zero_grad()
        model.weight.grad = torch.full_like(model.weight, value)
        model.bias.grad = None
        assert optimizer.step(0.0) == pytest.approx(value * 6**0.5)
