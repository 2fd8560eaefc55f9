"""What this machine offers a run by itself."""

from __future__ import annotations

import torch


def best_device() -> str:
    """The device a run takes by itself: cuda where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_threads() -> int:
    """The threads that torch uses by itself."""
    return torch.get_num_threads()
