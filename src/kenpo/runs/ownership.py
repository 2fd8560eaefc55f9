"""One process owns a run's folder: a lock file in it, held with ``flock``, that says which process that is.

The kernel lets go of the lock however the owner ends, also by SIGKILL, so a lock on this machine is never stale. The
record in the file speaks for owners elsewhere: on a network file system a lock may hold on one machine only. The owner
touches the file every few seconds; an owner on another machine counts as gone once the file has been left alone for
`SILENCE` seconds by the file system's own clock. Where the file system has no locks at all the record alone decides.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import uuid
import weakref
from pathlib import Path
from typing import Any

from kenpo.errors import RunError
from kenpo.runs.disk import disk_errors

NAME = "lock"
BEAT = 15.0  # seconds between two signs of life
SILENCE = 90.0  # seconds without one after which an owner on another machine counts as gone
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class InUseError(RunError):
    """Another process works in the run's folder."""


def machine() -> str:
    """What tells this machine, as it was started last, from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{uuid.getnode():x}"


def start_of(pid: int) -> str | None:
    """When process `pid` of this machine was started, in the kernel's own count; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""  # it lives; when it was started can't be told here


class Claim:
    """A run's folder held by this process, from here until `release`. Raises `InUseError` if another one holds it.

    With ``create`` missing folders are made; `release` removes those that are still empty.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self.folder, self.path = folder, folder / NAME
        self.made: list[Path] = []
        with disk_errors(f"run folder {folder}"):
            self.descriptor = self._open(create)
        self.record = {
            "pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "process": start_of(os.getpid()),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "token": uuid.uuid4().hex,
        }  # fmt: skip
        self._over = threading.Event()
        _held.add(self)
        try:
            with disk_errors(f"run folder {folder}"):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, json.dumps(self.record).encode(), 0)
                os.fsync(self.descriptor)
        except BaseException:
            self.release()
            raise
        threading.Thread(target=self._beat, args=(self.descriptor,), name="kenpo-lock", daemon=True).start()

    def _open(self, create: bool) -> int:
        """The lock file's descriptor, with the lock on it; the file may be removed by its last owner meanwhile."""
        while True:
            if create:
                self._make_folders()
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)  # closed in what is executed from here
            except FileNotFoundError:
                if not create:
                    raise
                continue
            try:
                self._lock(descriptor)
                if _same_file(descriptor, self.path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _make_folders(self) -> None:
        missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.made = missing or self.made

    def _lock(self, descriptor: int) -> None:
        locks = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(_in_use(self.folder, _read(descriptor))) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            locks = False
        record = _read(descriptor)
        if not record:
            return
        if record.get("machine") == machine():
            alive = not locks and start_of(int(record.get("pid", 0))) == record.get("process")
            if alive:
                raise InUseError(_in_use(self.folder, record))
            return
        quiet = self._now() - os.fstat(descriptor).st_mtime
        if quiet < SILENCE:
            raise InUseError(
                f"{_in_use(self.folder, record)}: its last sign of life came {max(0, quiet):.0f} s ago; "
                f"if it has ended, the folder is free in {SILENCE - quiet:.0f} s"
            )

    def _now(self) -> float:
        """The file system's time: two machines' clocks may differ."""
        probe = self.folder / f".{NAME}.{uuid.uuid4().hex}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self, descriptor: int) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    def check(self) -> None:
        """RunError if the folder is no longer this process's: the lock file was removed, or another one took it."""
        if not (_same_file(self.descriptor, self.path) and _read(self.descriptor) == self.record):
            raise RunError(
                f"{self.folder}: {NAME} was removed or another process has taken the folder over; nothing more is "
                f"written there; go on with: kenpo train --resume {self.folder}"
            )

    def release(self) -> None:
        """Let the folder go. The lock file goes with it, and folders that were made for it and hold nothing."""
        if self not in _held:
            return
        self._over.set()
        _held.discard(self)
        with contextlib.suppress(OSError):
            if _same_file(self.descriptor, self.path) and _read(self.descriptor) == self.record:
                self.path.unlink()
        with contextlib.suppress(OSError):  # those that hold something stay
            for folder in self.made:
                folder.rmdir()
        os.close(self.descriptor)


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget() -> None:
    """A forked child shares the lock with its parent and would hold it longer; closing its copy lets nothing go."""
    for claim in list(_held):
        with contextlib.suppress(OSError):
            os.close(claim.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        return record if isinstance(record, dict) and isinstance(record.get("pid", 0), int) else {}
    except (OSError, ValueError):
        return {}


def _in_use(folder: Path, record: dict[str, Any]) -> str:
    if not record:
        return f"{folder}: another process is at work on this run"
    since = str(record.get("since", "")).replace("T", " ").replace("+00:00", " UTC")[:40]
    return f"{folder}: process {record['pid']} on {str(record.get('host'))[:80]} is at work on this run since {since}"
