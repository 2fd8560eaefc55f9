"""The folder of a run: configuration, metrics, samples, recorded batches, checkpoints. One process writes it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kenpo.batches import save_rollouts
from kenpo.errors import InputError, RunError
from kenpo.trainer import state as checkpoints
from kenpo.trainer.config import TrainConfig, differences, load, resolve, to_dict
from kenpo.trainer.disk import disk_errors, sync_folder, write_json
from kenpo.types import Rollouts

LOGS = ("metrics.jsonl", "samples.jsonl")
_BATCH = re.compile(r"(\d{6,})\.safetensors(\.tmp)?")


def default_path(config: TrainConfig, root: Path = Path("runs")) -> Path:
    """``runs/ALGORITHM-TASK-N`` with the first N that is free."""
    stem = f"{_slug(config.algorithm)}-{_slug(config.task)}"
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
        return last, True
    return path, False


def finished(run: Path) -> bool:
    """Whether the run has come to its end."""
    return (run / "summary.json").is_file()


class RunFolder:
    """Open handle on one run's folder."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self.path, self.config = path, config
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new folder with its ``config.json``; it appears whole. InputError if `path` exists already."""
        refuse_existing(path)
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with disk_errors(f"run folder {path}"):
            try:
                temporary.mkdir(parents=True)
                write_json(temporary / "config.json", to_dict(config))
                os.rename(temporary, path)
                sync_folder(path.parent)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return cls(path, config)

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

    def save(self, state: checkpoints.TrainerState, model: Any, tokenizer: Any, optimizer: dict[str, Any]) -> Path:
        """Write a checkpoint of `state`, then remove old ones."""
        state.files = self.sizes()
        path = checkpoints.save_checkpoint(
            self.checkpoints, state, model, tokenizer, optimizer, self.config.save_adapter
        )
        checkpoints.prune(self.checkpoints, self.config.keep)
        return path

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
    if os.path.lexists(path):
        raise InputError(
            f"{path}: the run folder exists already; choose another --out, or go on with it by --resume {path}"
        )
    above = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"{path}: {above} is not a folder that can be written to; choose another --out")


def recorded_config(path: Path) -> TrainConfig:
    """The configuration of the run at `path`. InputError if there is no run."""
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no run to resume there (no config.json); start one with --out {path}")
    return resolve(load(path / "config.json"))


def check_same(recorded: TrainConfig, given: TrainConfig, path: Path) -> None:
    """InputError naming the options in which a resumed run would differ from what it was started with."""
    different = differences(recorded, given)
    if different:
        listed = "; ".join(f"{name} was {was!r}, now {now!r}" for name, (was, now) in different.items())
        raise InputError(
            f"{path}: the configuration differs from the recorded one ({listed}); "
            "resume it unchanged, or start a new run"
        )
