"""Code that a model folder brings along is never run, and loading a model asks nobody anything.

A folder may name Python files of its own (``auto_map`` in a configuration), kernels to be fetched from a hub, or a
module to import. All of these are code from data. A folder that works without them is opened with the classes of
transformers; one that needs them is refused by name.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kenpo.errors import InputError

#: Goes with every call that opens something through transformers.
NO_CODE: dict[str, Any] = {"trust_remote_code": False}


def wants_code(source: str, file: str, error: BaseException) -> InputError | None:
    """The error to raise if `error` of transformers says that `source` can't be opened without code of its own."""
    if "trust_remote_code" not in str(error) and "custom code" not in str(error):
        return None
    return InputError(
        f"{source}: {file} needs Python code that comes with the model, which Kenpo never runs; "
        "use a model whose architecture and tokenizer transformers itself has"
    )


def refuse_kernels(source: str, config: Any) -> None:
    """InputError for a configuration that names an implementation to be fetched from a hub (``owner/kernel``)."""
    for name in ("_attn_implementation", "_experts_implementation"):
        for part in (config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", None) or ())):
            value = getattr(part, name, None)
            if isinstance(value, str) and "/" in value:
                raise InputError(
                    f"{source}: config.json names {value!r} as {name.strip('_')}, code from a hub, which Kenpo never "
                    "runs; remove that line"
                )


def refuse_modules(source: str, file: str, adapter: Mapping[str, Any]) -> None:
    """InputError for an adapter's configuration that names a Python module to be imported."""
    if adapter.get("megatron_config"):
        raise InputError(
            f"{source}: {file} has a megatron_config, which imports the module that the file names; Kenpo never runs "
            "code that an adapter names; remove megatron_config and megatron_core"
        )


@contextlib.contextmanager
def nobody_asked() -> Iterator[None]:
    """Standard input is empty inside: it holds prompts, not answers to what a library may ask."""
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before
