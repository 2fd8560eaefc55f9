"""What a command line comes to: the resolved configuration, the run's folder, and whether the run goes on."""

from __future__ import annotations

from pathlib import Path

from kenpo.errors import InputError
from kenpo.ranks import Ranks
from kenpo.runs import folder as folders
from kenpo.runs.callbacks import check_loggers
from kenpo.trainer.config import FREE_ON_RESUME, TrainConfig, differences, load, resolve


def settle(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, Path, bool]:
    """The resolved configuration, the run's folder, and whether it is resumed. Rank 0 looks, the others follow."""
    check_loggers(config.loggers)
    series = config.series if not config.out else None
    path, resumed = Path(config.out or series or "."), config.resume
    if series:
        found, resumed = folders.next_in_series(path)
        path = Path(ranks.from_first(str(found)))
        resumed = ranks.from_first(resumed)
    elif config.resume and not config.out:
        raise InputError("--resume needs the run's folder: --resume RUN")
    if resumed:
        recorded = recorded_config(path)
        check_same(recorded, config, path)
        return (
            recorded.but(**{n: getattr(config, n) for n in (*sorted(FREE_ON_RESUME), "dry_run", "quiet")}),
            path,
            True,
        )
    resolved = resolve(config)
    if not config.out and not series:
        path = Path(ranks.from_first(str(folders.default_path(resolved.algorithm, resolved.task))))
    folders.refuse_existing(path)
    ranks.gather(0)  # nobody creates the folder before all have looked
    return resolved, path, False


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
