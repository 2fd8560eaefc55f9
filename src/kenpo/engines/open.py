"""Engines by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kenpo.engines.base import Engine
from kenpo.engines.hf import HFEngine
from kenpo.engines.vllm import ServerOptions, VLLMEngine
from kenpo.errors import unknown_name

Factory = Callable[[Any, Any], Engine]
"""Makes an engine of the trained model and its tokenizer."""

ENGINES: dict[str, Factory] = {"hf": HFEngine, "vllm": VLLMEngine}


def open_engine(
    name: str | Factory, model: Any, tokenizer: Any, sampling_tokens: int | None = None,
    server: ServerOptions | None = None,
) -> Engine:  # fmt: skip
    """The engine called `name`, or made by a factory of the user's own. UnknownNameError for a name not known.

    ``sampling_tokens`` bounds what the embedded engine holds at once; ``server`` says where vLLM's is.
    """
    if isinstance(name, str):
        if name not in ENGINES:
            raise unknown_name("engine", name, ENGINES, "(or your own as file.py:NAME)")
        if name == "hf" and sampling_tokens is not None:
            return HFEngine(model, tokenizer, sampling_tokens)
        if name == "vllm":
            return VLLMEngine(model, tokenizer, server)
        name = ENGINES[name]
    return name(model, tokenizer)
