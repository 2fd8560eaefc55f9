"""What users' own files rest on, frozen: public names and signatures, every stage's numbers and defaults.

A change breaks this test on purpose. If it is meant, write `signatures.json` anew (``python test_frozen_names.py``
from tests/) and say it in CHANGELOG.md. What a run's folder holds is frozen in trainer/test_frozen_folder.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import kenpo
from kenpo import stages
from kenpo.runs.checkpoint import TrainerState
from kenpo.trainer.config import TrainConfig, to_dict

FROZEN = Path(__file__).parent / "signatures.json"


def public() -> dict[str, str]:
    """Each name of `kenpo.__all__`: a function's parameters, a record's fields, or what it is."""
    found = {}
    for name in sorted(kenpo.__all__):
        thing = getattr(kenpo, name)
        if dataclasses.is_dataclass(thing) and name != "TrainConfig":
            found[name] = fields(thing)
        elif inspect.isclass(thing) or inspect.ismodule(thing):
            found[name] = "module" if inspect.ismodule(thing) else "class"
        else:
            found[name] = parameters(thing)
    return found


def parameters(function) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def fields(record) -> str:
    """``name`` or ``name=default``, in order."""

    def one(f: dataclasses.Field) -> str:
        if f.default is not dataclasses.MISSING:
            return f"{f.name}={f.default!r}"
        return f.name if f.default_factory is dataclasses.MISSING else f"{f.name}={f.default_factory.__name__}()"

    return ", ".join(map(one, dataclasses.fields(record)))


def parts() -> dict[str, str]:
    """Every stage that `kenpo.stages` offers, with its numbers and their defaults."""
    found = {n: v for n, v in vars(stages).items() if inspect.isclass(v) and issubclass(v, stages.Stage)}
    return {name: fields(found[name]) for name in sorted(found)}


def now() -> dict[str, dict[str, str]]:
    """Everything that is frozen, as of this source."""
    options = {name: json.dumps(value) for name, value in sorted(to_dict(TrainConfig()).items())}
    state = {field.name: "" for field in dataclasses.fields(TrainerState)}
    return {"kenpo": public(), "stages": parts(), "config.json": options, "state.json": state}


def changes(was: dict[str, str], is_: dict[str, str]) -> list[str]:
    """One line per name that differs."""
    names = [n for n in {**was, **is_} if was.get(n) != is_.get(n)]
    return [f"{n}: {was.get(n, '(not there)')!r} is now {is_.get(n, '(gone)')!r}" for n in names]


def test_public_names_and_signatures_are_as_frozen():
    assert changes(json.loads(FROZEN.read_text())["kenpo"], now()["kenpo"]) == []


def test_the_numbers_of_every_stage_are_as_frozen():
    assert changes(json.loads(FROZEN.read_text())["stages"], now()["stages"]) == []


def test_the_options_and_their_defaults_are_as_frozen():
    assert changes(json.loads(FROZEN.read_text())["config.json"], now()["config.json"]) == []


def test_what_a_checkpoint_says_of_a_run_is_as_frozen():
    assert changes(json.loads(FROZEN.read_text())["state.json"], now()["state.json"]) == []


def test_a_change_would_be_seen():
    frozen = parts()
    assert changes(frozen, frozen | {"Clip": "low=0.2, high=0.3"}) == [
        "Clip: 'low=0.2, high=0.2' is now 'low=0.2, high=0.3'"
    ]
    assert changes({"a": "x"}, {"b": "y"}) == ["a: 'x' is now '(gone)'", "b: '(not there)' is now 'y'"]
    assert "measure=True, of=None" in public()["coefficients"]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(now(), indent=2, ensure_ascii=False) + "\n")
