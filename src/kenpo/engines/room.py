"""How many tokens the embedded engine may hold at once, from the memory that is free."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

#: On a CPU a larger batch is no faster; on a GPU it is.
MOST = {"cpu": 65536, "cuda": 1 << 20}
LEAST = 1024
SHARE = 0.5  # of the free memory: gradients, the optimizer's moments and activations need theirs


def sampling_room(model: Any, max_tokens: int, reserved: int = 0) -> int:
    """Tokens (prompt and response, all rows) that sampling may hold at once: a power of 2, from 1,024 up.

    ``2^floor(log2(SHARE · (free − reserved) / bytes per token))``, at most 65,536 on a CPU and 1,048,576 on a GPU.
    ``reserved`` bytes are those that training will take later. An estimate: what is free is looked at once, now.
    """
    device = model.get_input_embeddings().weight.device
    most = MOST.get(device.type, MOST["cuda"])
    free = free_memory(device)
    if free is None:
        return most
    tokens = int(SHARE * max(0, free - reserved) / token_bytes(model, max_tokens))
    return max(LEAST, min(most, 1 << max(0, tokens.bit_length() - 1)))


def token_bytes(model: Any, max_tokens: int) -> int:
    """Bytes that one token takes while sampling, an estimate.

    Keys and values of every layer, twice over because dropping finished rows copies them, and a row's logits in float32
    with what sampling makes of them (about 8 copies), spread over the tokens of its response.
    """
    c = model.config.get_text_config(decoder=True)
    heads = getattr(c, "num_attention_heads", None) or 1
    hidden = getattr(c, "hidden_size", None) or 1
    width = (getattr(c, "head_dim", None) or hidden // heads) * (getattr(c, "num_key_value_heads", None) or heads)
    table = model.get_input_embeddings().weight
    cache = 2 * 2 * (getattr(c, "num_hidden_layers", None) or 1) * width * table.element_size()
    return max(1, cache + 8 * 4 * int(table.shape[0]) // max(1, max_tokens))


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on `device`; None where that can't be read.

    Processes of one machine that run together share what its CPU memory holds.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu" or platform.system() != "Linux":
        return None
    known = [n for n in (_available(Path("/proc/meminfo")), _left(Path("/sys/fs/cgroup"))) if n is not None]
    together = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(known) // max(1, int(together) if together.isdigit() else 1) if known else None


def _available(meminfo: Path) -> int | None:
    """What the kernel says can be taken without swapping."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found and found[0].isdigit() else None


def _left(cgroup: Path) -> int | None:
    """What is left of the limit of this container (of either version of cgroups); None where there is no limit."""
    for names in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in names)
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            return max(0, int(limit) - int(used))
    return None
