"""A float32 head on a model of lower precision: logits lose nothing to rounding, in sampling and in training alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kenpo.errors import InputError


class WideHead(nn.Linear):
    """A Linear that raises its input to the dtype of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits in the weight's dtype."""
        return nn.functional.linear(input.to(self.weight.dtype), self.weight, self.bias)


def widen_head(model: Any) -> None:
    """Turn the output head, and an input embedding tied to it, into float32. `InputError` if it is no plain Linear."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear:
        raise InputError(f"--head-dtype float32: the head of {type(model).__name__} is no plain linear layer")
    narrow = head.weight.dtype
    tied = head.weight is embedding.weight
    head.__class__ = WideHead
    for p in head.parameters():
        p.data = p.data.float()
    if tied:
        embedding.register_forward_hook(lambda _module, _inputs, out: out.to(narrow))
