"""What a command line comes to: the resolved configuration, the run's folder, and whether the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kenpo.errors import InputError, KenpoError, RunError
from kenpo.experience.shards import name_of as task_name
from kenpo.ranks import Ranks
from kenpo.runs import folder as folders
from kenpo.runs.callbacks import check_loggers
from kenpo.runs.checkpoint import step_of
from kenpo.runs.continuing import check_steps
from kenpo.runs.folder import RunFolder
from kenpo.runs.ownership import Claim, InUseError
from kenpo.trainer.config import FREE_ON_RESUME, TAKEN_ON_RESUME, RunConfig, TrainConfig, differences, load, resolve


def settle(config: TrainConfig, ranks: Ranks) -> tuple[RunConfig, RunFolder, bool]:
    """The resolved configuration, the run's folder, and whether it is resumed. Rank 0 looks, the others follow.

    The folder is this process tree's alone from here on. A dry run and a finished run take nothing. InputError for a
    folder that can't be used, `InUseError` where another process is at work.
    """
    check_loggers(config.loggers)
    given = config.whole()
    path, resumed = place(given, ranks)
    if resumed:
        run = recorded_config(path)
        more = (given.steps or 0) > run.steps
        claim = None if folders.finished(path) and not more else take(path, given.dry_run, True, ranks)
    else:
        run = resolve(given)
        folders.refuse_existing(path)
        ranks.gather(0)  # nobody creates the folder before all have looked
        claim = take(path, given.dry_run, False, ranks)
    try:
        if resumed:
            run = going_on(run.whole(), given, path)
        return run, RunFolder(path, run.keep, run.save_adapter, claim), resumed
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def going_on(recorded: RunConfig, given: TrainConfig, path: Path) -> RunConfig:
    """The recorded run with what may differ now. InputError for what may not."""
    check_same(recorded, given, path)
    free = {n: v for n in FREE_ON_RESUME if (v := getattr(given, n)) is not None}
    check_steps(path, RunFolder(path).last_checkpoint(), recorded, int(free.get("steps") or 0))
    return recorded.but(**free, **{n: getattr(given, n) for n in TAKEN_ON_RESUME})


def is_over(folder: RunFolder, checkpoint: Path | None, config: RunConfig) -> bool:
    """Whether the run has come to its end, and no further steps are asked for that its last checkpoint could take."""
    return folders.finished(folder.path) and not (checkpoint and step_of(checkpoint) < config.steps)


def already_finished(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """The summary of a run that was resumed after its end."""
    try:
        summary = json.loads((folder.path / "summary.json").read_text())
    except ValueError:
        raise RunError(f"{folder.path / 'summary.json'}: damaged, not JSON; remove it and resume once more") from None
    if not config.quiet:
        print(
            f"{folder.path}: already finished after {config.steps} steps; nothing to do "
            f"(for more: --resume {folder.path} --steps N)",
            file=sys.stderr,
        )
    return {**summary, "run": str(folder.path)}


def place(config: TrainConfig, ranks: Ranks) -> tuple[Path, bool]:
    """The run's folder, and whether the run there is to go on."""
    if config.out:
        return Path(config.out), config.resume
    if config.series:
        found, unfinished = folders.next_in_series(Path(config.series))
        return Path(ranks.from_first(str(found))), ranks.from_first(unfinished)
    if config.resume:
        raise InputError("--resume needs the run's folder: --resume RUN")
    return Path(ranks.from_first(str(folders.default_path(config.algorithm, task_name(config.task))))), False


def take(path: Path, dry_run: bool, resumed: bool, ranks: Ranks) -> Claim | None:
    """Rank 0's claim on the folder (None on the others). All ranks raise if it is refused."""
    claim, refusal = None, ""
    if ranks.first and not dry_run:
        try:
            claim = Claim(path, create=not resumed)
            if not resumed:
                folders.refuse_existing(path)  # another process may have made it in the meantime
        except KenpoError as error:
            if claim is not None:
                claim.release()
            if ranks.size == 1:
                raise
            refusal = str(error)
    if refusal := ranks.from_first(refusal):
        raise InUseError(refusal)
    return claim


def recorded_config(path: Path) -> RunConfig:
    """The configuration of the run at `path`. InputError if there is no run."""
    run = path.parent.parent
    if path.parent.name == "checkpoints" and (run / "config.json").is_file():
        raise InputError(f"{path}: a checkpoint of the run {run}; go on with the run: --resume {run}")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no run to resume there (no config.json); start one with --out {path}")
    return resolve(load(path / "config.json"))


def check_same(recorded: RunConfig, given: TrainConfig, path: Path) -> None:
    """InputError naming the options in which a resumed run would differ from what it was started with."""
    different = differences(recorded, given)
    if different:
        listed = "; ".join(f"{name} was {was!r}, now {now!r}" for name, (was, now) in different.items())
        raise InputError(
            f"{path}: the configuration differs from the recorded one ({listed}); "
            "resume it unchanged, or start a new run"
        )
