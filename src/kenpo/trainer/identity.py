"""What a run stands on besides its configuration: digests of rows, files and models, kept with every checkpoint.

A run that goes on with other rows, another verifier or another reference is another run. What changed is refused by
name; ``--accept-changes`` takes it, and ``changes.jsonl`` in the run's folder says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.weighted import read_weight
from kenpo.models.loading import BUNDLED
from kenpo.trainer.config import TrainConfig

Identity = dict[str, dict[str, Any]]  # a name as messages use it -> {"digest", "of", perhaps "rows"}

WHOLE = 256 << 20  # a larger file is known by its size and blocks spread over it
BLOCK, BLOCKS = 1 << 20, 64
_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt")


def identity(config: TrainConfig, task: Any) -> Identity:
    """Digests of what can be read without loading a model: rows, the user's own files, the model's folder."""
    found: Identity = {}
    if task.ids is not None:
        found["rows of the task"] = _rows(config.task, [task.problem(n) for n in task.ids])
    if config.eval_problems and (task.ids is not None or config.eval_file):
        found["held-out rows"] = _rows(config.eval_file or config.task, task.heldout(config.eval_problems))
    for package in _packages(config):
        found[f"version of {package}"] = {"digest": _version(package), "of": package}
    for name, file in _own_files(config):
        if file.is_file():
            found[f"{name} {file.name}"] = {"digest": file_digest(file), "of": str(file)}
    folder = _model_folder(config.model)
    if folder is not None:
        found["model"] = {"digest": folder_digest(folder), "of": config.model}
    return found


def identity_of_tokenizer(tokenizer: Any) -> Identity:
    """Digests of the vocabulary and of the chat template in use."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    template = getattr(tokenizer, "chat_template", None)
    return {
        "vocabulary": {"digest": _digest([vocabulary.encode()]), "of": "the tokenizer"},
        "chat template": {"digest": _digest([json.dumps(template).encode()]), "of": "the tokenizer"},
    }


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


def _rows(source: str, problems: Sequence[Any]) -> dict[str, Any]:
    lines = (
        json.dumps([p.prompt, p.answer, dict(p.extra)], sort_keys=True, default=str).encode() + b"\n" for p in problems
    )
    return {"digest": _digest(lines), "of": str(source), "rows": len(problems)}


def _packages(config: TrainConfig) -> Iterable[str]:
    if config.task.startswith("reasoning_gym"):
        yield "reasoning-gym"
    if "math_verify" in _verifiers(config):
        yield "math-verify"


def _verifiers(config: TrainConfig) -> list[str]:
    named = config.verifier or ()
    return [read_weight(item)[0] for item in ([named] if isinstance(named, str) else named)]


def _own_files(config: TrainConfig) -> Iterable[tuple[str, Path]]:
    for spec in _verifiers(config):
        file = Path(spec.rpartition(":")[0])
        if file.suffix == ".py":
            yield "verifier", file
    where = config.algorithm.rpartition(":")[0]
    if where.endswith(".py"):
        yield "algorithm", Path(where)
    elif where in sys.modules:  # it was imported to be resolved
        yield "algorithm", Path(getattr(sys.modules[where], "__file__", None) or "")


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
    return _digest(f"{path.name} {file_digest(path)}\n".encode() for path in files)


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


def _digest(parts: Iterable[bytes]) -> str:
    digest = _hash()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
