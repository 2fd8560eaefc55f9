"""Tasks: where prompts and answers come from, and which of them are held out.

A task is a pure function of an index: `train(i)` depends on the data, the seed and `i` alone, so a run's whole data
cursor is the next index. Held-out problems never depend on the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from kenpo.errors import InputError, unknown_name
from kenpo.experience.problem import Problem
from kenpo.experience.rows import FORMATS
from kenpo.experience.shards import Spec, looks_like_data

REASONING_GYM = "reasoning_gym"


@runtime_checkable
class Task(Protocol):
    """What the trainer needs of a task.

    `system` is a system prompt for models with a chat template, or None; `ids` those of all training problems, None
    where the stream is endless, and `size` their number.
    """

    name: str
    system: str | None

    @property
    def verifier(self) -> str:
        """The task's own verifier; InputError if its answers ask for none of ours."""
        ...

    @property
    def ids(self) -> Sequence[int] | None:
        """The ids of all training problems; None if there is no end of them."""
        ...

    @property
    def size(self) -> int | None:
        """The number of training problems; None if there is no end of them."""
        ...

    def problem(self, id: int) -> Problem:
        """The training problem of that id. InputError for an id that no training problem has."""
        ...

    def train(self, index: int) -> Problem:
        """The `index`-th (from 0) problem of an endless stream; finite data is reshuffled once per epoch."""
        ...

    def heldout(self, n: int) -> list[Problem]:
        """Up to `n` fixed problems that no `train(index)` ever gives; InputError if there is none."""
        ...


def load_task(
    spec: Spec,
    *,
    seed: int = 0,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    heldout: int = 500,
    eval_file: Spec | None = None,
    system: str | None = None,
) -> Task:
    """The task named by `spec`: a built-in name, `reasoning_gym:NAME`, or data as `read_rows` takes them: a file,
    several, a folder of shards, a pattern, `hub:NAME:SPLIT`.

    The column names, `heldout` (most rows split off) and `eval_file` speak of data; given to another task, a column
    or `eval_file` is refused. Raises InputError for data that can't be used (file, row, column and mend are named)
    and UnknownNameError for a name that is not known.
    """
    if not isinstance(spec, str | Path):
        spec = tuple(map(str, spec))
        spec = spec[0] if len(spec) == 1 else spec
    elif not str(spec).strip():
        raise InputError(f"task: a name or a file is needed, got {spec!r}")
    if heldout < 0:
        raise InputError(f"heldout is {heldout}; it counts held-out problems and can't be negative")
    columns = (prompt_column, answer_column) != ("prompt", "answer")
    for name in (str(spec),) if isinstance(spec, str | Path) else spec:
        built_in = name in BUILT_IN or name.partition(":")[0] == REASONING_GYM
        if built_in and not isinstance(spec, str | Path):
            raise InputError(f"task {name}: several tasks at once are data files; name it alone")
        if built_in and (columns or eval_file is not None):
            option = "eval_file" if eval_file is not None else "prompt_column and answer_column"
            raise InputError(f"task {name}: {option} can only be used with a data file; leave it out")
        if not built_in and not looks_like_data(name):
            hint = f"(or {REASONING_GYM}:NAME, hub:NAME, or a data file: {FORMATS})"
            raise unknown_name("task", name, [*BUILT_IN, f"{REASONING_GYM}:NAME"], hint)
        if built_in:
            return BUILT_IN[name](seed, system) if name in BUILT_IN else _reasoning_gym(name, seed, system)

    from kenpo.experience.files import FileTask

    return FileTask(
        spec,
        seed=seed,
        prompt_column=prompt_column,
        answer_column=answer_column,
        heldout=heldout,
        eval_file=eval_file,
        system=system,
    )


def _addition(seed: int, system: str | None) -> Task:
    from kenpo.experience.addition import AdditionTask

    task = AdditionTask(seed=seed)
    if system is not None:
        task.system = system
    return task


def _reasoning_gym(spec: str, seed: int, system: str | None) -> Task:
    from kenpo.experience.gym import GymTask

    _, _, name = spec.partition(":")
    return GymTask(name, seed=seed, system=system)


BUILT_IN: dict[str, Callable[[int, str | None], Task]] = {"addition": _addition}
