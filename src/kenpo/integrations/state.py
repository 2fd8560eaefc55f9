"""What a stateful algorithm hands on from batch to batch, kept in a host's checkpoint folders: JSON and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kenpo.algorithm import Algorithm
from kenpo.errors import InputError
from kenpo.nested import join, split

NAME = "kenpo_state"


def save_stream(folder: Path, algorithm: Algorithm, state: Any) -> None:
    """Write `state` beside the checkpoint's weights, with the algorithm it belongs to."""
    plain, tensors = split(state, "state")
    (folder / f"{NAME}.json").write_text(json.dumps({"algorithm": algorithm.name, "state": plain}))
    save_file(tensors, str(folder / f"{NAME}.safetensors"))


def load_stream(folder: Path, algorithm: Algorithm) -> Any:
    """The state that was saved in `folder`, or None where none was. InputError if another algorithm wrote it."""
    path = folder / f"{NAME}.json"
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        written, plain = record["algorithm"], record["state"]
        state = join(plain, load_file(str(folder / f"{NAME}.safetensors")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a state that training can go on from ({error})") from None
    if written != algorithm.name:
        raise InputError(f"{path}: the state of {written!r}, but the trainer runs {algorithm.name!r}")
    return state
