"""Writing that is whole or absent, and a full disk as a named error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kenpo.errors import InputError, RunError


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full or failing disk into `RunError`, whether Python or the safetensors library meets it."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
        raise RunError(f"{what} could not be written: {reason}; what was saved before is intact") from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        text = " ".join(str(error).split())
        reason = "the disk is full" if "os error 28" in text or "No space left" in text else text
        raise RunError(f"{what} could not be written: {reason}; what was saved before is intact") from None


def check_room(path: Path, number: int, each: int) -> None:
    """InputError if the disk that will hold `path` has less free than `number` checkpoints of `each` bytes take."""
    place = next((p for p in (path, *path.absolute().parents) if p.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    if free < number * each:
        raise InputError(
            f"{path}: {number} checkpoint(s) of about {each / 2**20:,.1f} MiB need {number * each / 2**20:,.1f} MiB, "
            f"but {free / 2**20:,.1f} MiB are free on that disk; free some, name another place with --out, or keep "
            "fewer (--keep, --checkpoint-every)"
        )


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (new names, renames) durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file under `folder` durable."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb+") as f:
                os.fsync(f.fileno())
        sync_folder(Path(root))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: readers see the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w") as f:
            f.write(json.dumps(value, indent=2) + "\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_tree(folder: Path) -> None:
    """Remove a folder under a name that no reader looks for: a half-removed one is never taken for a whole one."""
    doomed = folder.with_name(folder.name + ".tmp-old")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)
