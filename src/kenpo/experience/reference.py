"""Log-probs of the policy that a run started from, on rows that don't change: computed once, kept in the run's folder.

The reference model needs no memory while the run trains. The file says what it was made of, and is refused where that
is not what the run stands on now.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenpo.episode import Episode
from kenpo.errors import InputError, RunError
from kenpo.experience.source import Start

FILE = "reference.safetensors"
#: What a run stands on (`kenpo.runs.identity`) that the log-probs depend on.
DEPENDS_ON = ("model", "chat template", "numbers")

LogProbs = Callable[[Sequence[Episode]], Tensor]
"""Episodes -> log-probs of their sampled tokens, end to end [n]."""


def _said(entry: Any) -> str:
    return str(entry["digest"] if isinstance(entry, Mapping) else entry)


def digest(episode: Episode) -> bytes:
    """What stands for a row: its tokens, and where the response begins."""
    ids = array("q", [len(episode.prompt), *(i for s in episode.segments for i in s.ids)])
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


class ReferenceLogProbs:
    """Log-probs [T] of each row's sampled tokens, found by the row's digest.

    `stands_on` names the model's weights, the chat template and the numbers (dtype, temperature) by digests.
    """

    def __init__(self, rows: Sequence[Episode], stands_on: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.rows = list({digest(e): e for e in rows}.values())
        self.dtype = dtype
        whole = hashlib.blake2b(b"".join(digest(e) for e in self.rows), digest_size=16).hexdigest()
        self.key = {"rows": whole, **{n: _said(stands_on[n]) for n in DEPENDS_ON if n in stands_on}}
        self._logp: dict[bytes, Tensor] = {}

    def obtain(self, score: LogProbs, start: Start, at_once: int = 256) -> None:
        """Read the file in the run's folder; before the first step compute and write it, if there is none.

        `InputError` for another's file, and for a missing one where the weights have moved on.
        """
        path = start.folder / FILE
        if path.is_file():
            self._take(self._read(path))
            return
        if start.step:
            raise InputError(
                f"{path}: missing, and after step {start.step} the weights are no longer those of the start; put the "
                "file back, or start a new run"
            )
        parts = [score(self.rows[i : i + at_once]).to(self.dtype) for i in range(0, len(self.rows), at_once)]
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype)
        if start.first:
            self._write(path, flat)
        self._take(flat)

    def of(self, episodes: Sequence[Episode], mask: Tensor) -> Tensor:
        """[B,T] the rows' log-probs at the places of `mask` [B,T]; 0 elsewhere."""
        found = torch.zeros(mask.shape, dtype=self.dtype)
        found[mask] = torch.cat([self._logp[digest(e)] for e in episodes])
        return found

    def _take(self, flat: Tensor) -> None:
        sizes = [len(e.tokens) for e in self.rows]
        if sum(sizes) != len(flat):
            raise RunError(f"{FILE}: holds {len(flat)} log-probs, the rows have {sum(sizes)} tokens; it was changed")
        self._logp = {digest(e): part for e, part in zip(self.rows, flat.split(sizes), strict=True)}

    def _write(self, path: Path, flat: Tensor) -> None:
        from safetensors.torch import save_file

        temporary = path.with_name(f"{path.name}.tmp")
        try:
            save_file({"logp": flat.contiguous()}, str(temporary), metadata={"key": json.dumps(self.key)})
            os.replace(temporary, path)
        except OSError as error:
            raise RunError(f"{path}: can't be written ({error.strerror or error})") from error

    def _read(self, path: Path) -> Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                key = json.loads((file.metadata() or {})["key"])
                flat: Tensor = file.get_tensor("logp")
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise InputError(f"{path}: no log-probs of a reference ({error}); start a new run") from None
        different = [n for n, v in self.key.items() if not isinstance(key, dict) or key.get(n) != v]
        if different:
            raise InputError(
                f"{path}: log-probs of the reference for other {', '.join(different)} than the run has now; put back "
                "what was there, or start a new run"
            )
        return flat
