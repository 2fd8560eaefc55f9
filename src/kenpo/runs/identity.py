"""Digests of what a run stands on, kept with every checkpoint, and what changed since.

A run that goes on with other rows, another verifier or another reference is another run. What changed is refused by
name; ``--accept-changes`` takes it, and ``changes.jsonl`` in the run's folder says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kenpo.errors import InputError
from kenpo.models.loading import BUNDLED

Identity = dict[str, dict[str, Any]]  # a name as messages use it -> {"digest", "of", perhaps "rows"}

WHOLE = 256 << 20  # a larger file is known by its size and blocks spread over it
BLOCK, BLOCKS = 1 << 20, 64
_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")


def changes(recorded: Mapping[str, Any], now: Identity) -> list[str]:
    """What differs, as a message says it. What was not recorded, or can't be read any more, is not compared."""
    told = []
    for name, entry in now.items():
        before = recorded.get(name)
        if not isinstance(before, dict) or before.get("digest") == entry["digest"]:
            continue
        counts = f": {before['rows']} then, {entry['rows']} now" if before.get("rows") != entry.get("rows") else ""
        told.append(f"{name} ({entry['of']}{counts})")
    return told


def refuse_changes(recorded: Mapping[str, Any], now: Identity, where: Path, accept: bool) -> list[str]:
    """The changes since the checkpoint at `where`, if the user accepts them. InputError that names them otherwise."""
    told = changes(recorded, now)
    if told and not accept:
        raise InputError(
            f"{where.parents[1]}: since {where.name} other contents have come into: {', '.join(told)}; put back what "
            "was there, start a new run, or go on with --accept-changes"
        )
    return told


def recorded_identity(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says the run stood on; nothing where it can't be read, which loading it says in full."""
    try:
        recorded = json.loads((checkpoint / "trainer" / "state.json").read_text())["stands_on"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def rows_digest(source: str, rows: Sequence[Any]) -> dict[str, Any]:
    """An entry for rows of a data file, each a JSON-able value."""
    lines = (json.dumps(row, sort_keys=True, default=str).encode() + b"\n" for row in rows)
    return {"digest": digest_of(lines), "of": str(source), "rows": len(rows)}


def file_entry(path: str | Path) -> dict[str, Any]:
    """An entry for a file by its content. InputError where there is none."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file")
    return {"digest": file_digest(Path(path)), "of": str(path)}


def model_entry(model: str) -> dict[str, Any] | None:
    """An entry for a model's files; None while a hub's are not here yet."""
    folder = _model_folder(model)
    return None if folder is None else {"digest": folder_digest(folder), "of": model}


def package_entry(package: str) -> dict[str, Any]:
    """An entry for an installed package by its version."""
    try:
        return {"digest": version(package), "of": package}
    except PackageNotFoundError:
        return {"digest": "none", "of": package}


def tokenizer_entries(tokenizer: Any) -> Identity:
    """Digests of the vocabulary and of the chat template in use."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    template = getattr(tokenizer, "chat_template", None)
    return {
        "vocabulary": {"digest": digest_of([vocabulary.encode()]), "of": "the tokenizer"},
        "chat template": {"digest": digest_of([json.dumps(template).encode()]), "of": "the tokenizer"},
    }


def _model_folder(model: str) -> Path | None:
    """The folder of a model: its own, or where the hub's files were put; None where there is none yet."""
    if model == "bundled":
        return BUNDLED
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def folder_digest(folder: Path) -> str:
    """One digest of the model's, tokenizer's and adapter's files right in `folder`."""
    files = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()})
    return digest_of(f"{path.name} {file_digest(path)}\n".encode() for path in files)


def file_digest(path: Path) -> str:
    """A digest of a file's content; of a file above `WHOLE` bytes, of its size and of `BLOCKS` blocks spread evenly."""
    stat = path.stat()
    return _file_digest(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _file_digest(path: Path, size: int, changed: int) -> str:
    with open(path, "rb") as f:
        if size <= WHOLE:
            return hashlib.file_digest(f, _hash).hexdigest()
        digest = _hash(f"{size} ".encode())
        for i in range(BLOCKS):
            f.seek((size - BLOCK) * i // (BLOCKS - 1))
            digest.update(f.read(BLOCK))
        return digest.hexdigest()


def _hash(data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=16)


def digest_of(parts: Iterable[bytes]) -> str:
    """One digest of these bytes in a row."""
    digest = _hash()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
