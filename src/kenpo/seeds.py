"""Seeds from integers, the same on every machine and in every process."""

from __future__ import annotations

import hashlib


def stable_seed(*parts: int) -> int:
    """A 63-bit seed from integers, the same on every machine and in every process."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
