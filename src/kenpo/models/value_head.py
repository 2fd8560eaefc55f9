"""Scalar heads on a model's hidden states: values of tokens, and a score at the last one. Saved beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kenpo.errors import InputError

#: Policy fields that a scalar head makes: V before each token [B,T], and a scalar at the last trainable token [B].
SCALARS = ("values", "score")
FILE = "scalar_heads.safetensors"


class ScalarHead(nn.Module):
    """``states · weight + bias``, in float32 at least, and exactly 0 for every state while it is fresh.

    The bias is the answer where the states say nothing; a critic usually starts near the mean return.
    """

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.zeros(hidden, dtype=wide))
        self.bias = nn.Parameter(torch.zeros((), dtype=wide))

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [...]."""
        return states.to(self.weight.dtype) @ self.weight + self.bias


class ScalarHeads(nn.Module):
    """The heads of one model by the Policy field that each makes; none, for a model that only speaks."""

    def __init__(self, heads: Mapping[str, ScalarHead] | None = None) -> None:
        super().__init__()
        for name, head in (heads or {}).items():
            self.add_module(name, head)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)


def new_heads(model: Any, names: Iterable[str], *, seed: int | None = None) -> ScalarHeads:
    """Fresh heads for a model, by the Policy field that each makes. `InputError` for another name.

    All zeros, or with `seed` weights of ±1/√H, drawn without touching the global generator.
    """
    config = model.config.get_text_config(decoder=True)
    weight = next(model.parameters())
    heads: dict[str, ScalarHead] = {}
    for name in names:
        if name not in SCALARS:
            raise InputError(f"scalar head {name!r}: a head makes one of {', '.join(SCALARS)}")
        head = ScalarHead(config.hidden_size, weight.dtype).to(weight.device)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed + SCALARS.index(name))
            drawn = torch.rand(head.weight.shape, generator=generator, dtype=head.weight.dtype)
            with torch.no_grad():
                head.weight.copy_((2 * drawn - 1) * config.hidden_size**-0.5)
        heads[name] = head
    return ScalarHeads(heads)


def save_heads(heads: ScalarHeads, folder: Path) -> None:
    """Write the heads into a model's folder, in a file of their own."""
    from safetensors.torch import save_file

    tensors = {n: v.detach().cpu().contiguous() for n, v in heads.state_dict().items()}
    save_file(tensors, str(folder / FILE))


def load_heads(model: Any, folder: Path) -> ScalarHeads | None:
    """The heads that were saved with a model, or None. `InputError` for a file that does not fit it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        tensors = load_file(str(path))
        heads = new_heads(model, sorted({n.partition(".")[0] for n in tensors}))
        heads.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{path}: no scalar heads of this model ({str(error).splitlines()[0][:160]})") from None
    return heads


def score_head(model: Any, folder: Path) -> ScalarHeads:
    """The head for scores that lies in the model's folder, or a fresh one."""
    heads = load_heads(model, folder)
    if heads is None or "score" not in heads:
        return new_heads(model, ("score",))
    return ScalarHeads({"score": cast(ScalarHead, heads["score"])})
