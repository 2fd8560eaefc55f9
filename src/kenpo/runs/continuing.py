"""How a run may go on otherwise than it was started: more steps, other intervals, another number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kenpo.errors import InputError
from kenpo.runs.checkpoint import step_of

#: Options that a resumed run may take from the command line and that are recorded anew: they change no past number.
ANEW = frozenset({"steps", "eval_every", "checkpoint_every", "log_samples"})


def check_steps(run: Path, checkpoint: Path | None, recorded: Any, steps: int) -> None:
    """InputError for a number of steps that the run can't take up: one that its past depended on, or has passed.

    ``recorded`` is the run's configuration. Under a constant rate a run of n steps is the beginning of every longer
    one; the rates of the other schedules are made of the number of steps.
    """
    if steps in (0, recorded.steps):
        return
    if recorded.course != "constant":
        raise InputError(
            f"{run}: --steps {steps}: the {recorded.course} schedule made every rate so far from {recorded.steps} "
            "steps, so this would be no run of any length; start a new run from its checkpoint (--model)"
        )
    done = step_of(checkpoint)
    if steps < done:
        raise InputError(f"{run}: --steps {steps}: it has done {done} steps already")
    if checkpoint is None and (run / "summary.json").is_file():
        raise InputError(f"{run}: --steps {steps}: the finished run has no checkpoint left to go on from")


def check_processes(run: Path, then: int, now: int, config: Any) -> str | None:
    """What to say where a run goes on with another number of processes; None where it is the same.

    Samples, batches and state don't depend on the number: seeds are made of places in the batch, the state of a source
    and of the optimizer is whole. Only sums are added in another order. InputError where parts of the user's own may
    keep something on each process.
    """
    if then == now:
        return None
    own = [f"--{n} {v}" for n in ("engine", "source") if ":" in str(v := getattr(config, n))]
    if own:
        raise InputError(
            f"{run}: the run used {then} process(es), now there are {now}; {' and '.join(own)} may keep state on each "
            f"of them, so resume it with {then}"
        )
    return (
        f"{now} process(es) in place of {then}: sums are added in another order, so the run agrees with one that was "
        "not stopped to rounding, not bit for bit"
    )


def changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """{name: [then, now]} of the options in `ANEW` that a resumed run changes."""
    return {n: [recorded.get(n), now[n]] for n in sorted(ANEW) if n in now and now[n] != recorded.get(n)}
