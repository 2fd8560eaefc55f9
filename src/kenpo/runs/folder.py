"""The folder of a run: configuration, metrics, samples, recorded batches, checkpoints. One process writes it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kenpo.batches import save_rollouts
from kenpo.errors import InputError, RunError
from kenpo.jsonfile import read_json
from kenpo.runs import checkpoint as checkpoints
from kenpo.runs import ownership
from kenpo.runs.continuing import changed
from kenpo.runs.disk import check_room, disk_errors, sync_folder, write_json
from kenpo.types import Rollouts

LOGS = ("metrics.jsonl", "samples.jsonl")
_BATCH = re.compile(r"(\d{6,})\.safetensors(\.tmp)?")


def default_path(algorithm: str, task: str, root: Path = Path("runs")) -> Path:
    """``runs/ALGORITHM-TASK-N`` with the first N that is free."""
    stem = f"{_slug(algorithm)}-{_slug(task)}"
    n = 1
    while (root / f"{stem}-{n}").exists():
        n += 1
    return root / f"{stem}-{n}"


def _slug(name: str) -> str:
    if name.endswith((".jsonl", ".json", ".parquet")):
        name = Path(name).stem
    name = name.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-") or "run"


def next_in_series(first: Path) -> tuple[Path, bool]:
    """The run of a series (RUN, RUN-2, RUN-3 …) to work on, and whether it is unfinished and is to be resumed."""
    n, path = 1, first
    last: Path | None = None
    while path.exists():
        last, n = path, n + 1
        path = first.with_name(f"{first.name}-{n}")
    if last is not None and not finished(last):
        return last, not unborn(last)
    return path, False


def unborn(run: Path) -> bool:
    """Whether the folder holds no run yet, only the lock of a process that is about to start one, or died doing so."""
    try:
        return [p.name for p in run.iterdir()] == [ownership.NAME]
    except OSError:
        return False


def finished(run: Path) -> bool:
    """Whether the run has come to its end."""
    return (run / "summary.json").is_file()


class RunFolder:
    """Open handle on one run's folder. ``keep``: checkpoints kept, 0 for all; ``adapter_only``: what they hold.

    With a ``claim`` the folder is this process's alone until the end of a ``with`` block, and every write checks that.
    """

    def __init__(
        self, path: Path, keep: int = 0, adapter_only: bool = False, claim: ownership.Claim | None = None
    ) -> None:
        self.path, self.keep, self.adapter_only, self.claim = path, keep, adapter_only, claim
        self.checkpoints = path / "checkpoints"

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        if self.claim is not None:
            self.claim.release()

    def create(self, config: Mapping[str, Any], number: int = 0, each: int = 0) -> None:
        """Make the folder with its ``config.json``, which makes it a run. InputError if one is there already, or if
        the disk has no room for `number` checkpoints of `each` bytes."""
        refuse_existing(self.path)
        check_room(self.path, number, each)
        with disk_errors(f"run folder {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", config)
            sync_folder(self.path)
            sync_folder(self.path.parent)

    def check_owner(self) -> None:
        """RunError if another process has taken the folder over."""
        if self.claim is not None:
            self.claim.check()

    def last_checkpoint(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = checkpoints.found(self.checkpoints)
        return whole[-1] if whole else None

    def cut_back(self, state: checkpoints.TrainerState) -> None:
        """Undo whatever was written after the checkpoint: later metrics, samples and batches, interrupted writes."""
        checkpoints.sweep(self.checkpoints)
        for name in LOGS:
            path, size = self.path / name, state.files.get(name, 0)
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise RunError(
                    f"{path}: shorter ({there} bytes) than when the checkpoint was written ({size}); it was changed"
                )
            if there:
                os.truncate(path, size)
        self.metrics()  # damage is met now, not after the last step
        for batch in (self.path / "batches").glob("*"):
            recorded = _BATCH.fullmatch(batch.name)  # other names are the user's
            if recorded and (recorded[2] or int(recorded[1]) > state.step):
                batch.unlink()
        for name in ("summary.json", "summary.json.tmp", "config.json.tmp"):
            (self.path / name).unlink(missing_ok=True)

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add JSON lines to one of the logs. RunError if the disk refuses."""
        self.check_owner()
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if text:
            with disk_errors(name), open(self.path / name, "ab") as f:
                f.write(text.encode("utf-8", "backslashreplace"))  # a lone surrogate stays readable JSON

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, made durable first: a checkpoint relies on them."""
        sizes = {}
        for name in LOGS:
            path = self.path / name
            if path.exists():
                with disk_errors(name), open(path, "rb+") as f:
                    os.fsync(f.fileno())
                sizes[name] = path.stat().st_size
        return sizes

    def record_batch(self, step: int, rollouts: Rollouts, info: dict[str, Any]) -> None:
        """``batches/NNNNNN.safetensors``, as the lab reads it. RunError if the disk refuses."""
        with disk_errors(f"batch {step}"):
            (self.path / "batches").mkdir(exist_ok=True)
            save_rollouts(self.path / "batches" / f"{step:06d}.safetensors", rollouts, info)

    def save(
        self, state: checkpoints.TrainerState, model: Any, tokenizer: Any, optimizer: dict[str, Any], heads: Any = None,
        part: checkpoints.Part | None = None,
    ) -> Path:  # fmt: skip
        """Write a checkpoint of `state`, then remove old ones."""
        self.check_owner()
        state.files = self.sizes()
        path = checkpoints.save_checkpoint(
            self.checkpoints, state, model, tokenizer, optimizer, self.adapter_only, heads, part
        )
        checkpoints.prune(self.checkpoints, self.keep, state.best.get("step"))
        return path

    def record_anew(self, config: Mapping[str, Any], step: int) -> None:
        """Write down the options that a resumed run changes: in ``config.json``, and in ``changes.jsonl`` from when."""
        told = changed(read_json(self.path / "config.json"), config)
        if told:
            self.append("changes.jsonl", [{"step": step, "options": told}])
            with disk_errors("config.json"):
                write_json(self.path / "config.json", config)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``: its presence says that the run is finished."""
        with disk_errors("summary.json"):
            write_json(self.path / "summary.json", summary)

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of ``metrics.jsonl`` so far."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise RunError(f"{path}: damaged, not JSON lines ({error})") from None


def refuse_existing(path: Path) -> None:
    """InputError if there is something at `path` already, or if no folder can be made there."""
    if os.path.lexists(path) and not unborn(path):
        raise InputError(
            f"{path}: the run folder exists already; choose another --out, or go on with it by --resume {path}"
        )
    above = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path}: {above} is not a folder that can be written to; choose another --out")
