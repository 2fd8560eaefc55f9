"""`--sandbox`: a worker under bubblewrap.

It reads what its user may read, writes to a /tmp of its own that vanishes with it, sees no other process and no
network, and gets none of the environment's secrets.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kenpo.errors import InputError

_KEPT = ("PATH", "HOME", "LANG", "TZ", "OMP_NUM_THREADS", "VIRTUAL_ENV", "KENPO_WORKER")
_HIDDEN = ("/tmp", "/var/tmp", "/run")  # others' files, and sockets that lead out of the sandbox
_KEPT_STARTS = ("LC_", "PYTHON")


def check() -> str:
    """The path of bubblewrap; InputError where it is not there or may not make namespaces."""
    found = shutil.which("bwrap")
    if found is None:
        raise InputError(
            "--sandbox needs bubblewrap (the program bwrap), which is not there: install your system's package "
            "bubblewrap, or run Kenpo itself in a container"
        )
    return found


def prefix(file: str | None) -> list[str]:
    """What stands in front of a worker's command. The folder of the user's `file` is shown where it is, to be read."""
    hidden = sorted({os.path.realpath(p) for p in (*_HIDDEN, tempfile.gettempdir()) if os.path.isdir(p)})
    wanted = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), *(p for p in sys.path if os.path.isdir(p))}
    if file is not None:
        wanted.add(str(Path(file).parent))
    shown = sorted(p for p in wanted if any(Path(p).is_relative_to(h) for h in hidden))
    return [
        check(), "--die-with-parent", "--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
        "--unshare-net", "--unshare-cgroup-try", "--new-session", "--cap-drop", "ALL",
        "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
        *(arg for path in hidden for arg in ("--tmpfs", path)),
        *(arg for path in shown for arg in ("--ro-bind", path, path)), "--",
    ]  # fmt: skip


def environment(whole: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program needs to run; no keys or tokens."""
    return {name: value for name, value in whole.items() if name in _KEPT or name.startswith(_KEPT_STARTS)}
