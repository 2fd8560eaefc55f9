"""Keeps large freed blocks in the process: on a CPU a training step allocates the same tensors again and again.

glibc gives blocks above a threshold back to the system as soon as they are freed, and the system fills every new one
with zeros, page by page, on first touch. For a small model's activations that costs about as much as an element-wise
operation on them.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Names and limits of malloc.h; glibc takes no mmap threshold above 32 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _KEPT = 32 * 2**20, 2**30


def keep_freed_memory() -> bool:
    """Ask glibc to keep up to 1 GiB of what is freed; True if it does. The user's own MALLOC_ variables go first."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False  # another C library
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(libc.mallopt(_TRIM_THRESHOLD, _KEPT))
