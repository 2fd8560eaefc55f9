"""What --help says: every option with a text, in groups, as it is typed; and what a misspelt option is answered."""

import dataclasses
import re

import pytest

from kenpo.cli import COMMANDS, main
from kenpo.commands import groups
from kenpo.commands.arguments import option_names
from kenpo.commands.evaluation import EvalOptions
from kenpo.commands.help import OTHER, Beside, docstrings, help_text
from kenpo.commands.training import SampleOptions
from kenpo.trainer.config import TrainConfig

GROUPED = {"train": (TrainConfig, groups.TRAIN), "eval": (EvalOptions, groups.EVAL),
           "sample": (SampleOptions, groups.SAMPLE)}  # fmt: skip


def help_of(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def listed(page):
    """Options at the head of a line, in order."""
    return re.findall(r"^  (--[a-z-]+)", page, flags=re.M)


@pytest.mark.parametrize("command", GROUPED)
def test_every_option_is_listed_once_with_a_text(command, capsys):
    cls, table = GROUPED[command]
    page = help_of(capsys, command)
    beside = [n.option for names in table.values() for n in names if isinstance(n, Beside)]
    assert sorted(listed(page)) == sorted([*option_names(cls), *beside])
    said = docstrings(cls)
    assert [f.name for f in dataclasses.fields(cls) if not said.get(f.name)] == []
    assert "None" not in page
    assert all(f"\n{title}:\n" in page for title in table)


@pytest.mark.parametrize("command", GROUPED)
def test_groups_name_fields_that_there_are(command):
    cls, table = GROUPED[command]
    fields = {f.name for f in dataclasses.fields(cls)}
    named = [n for names in table.values() for n in names if not isinstance(n, Beside)]
    assert len(named) == len(set(named))
    assert set(named) <= fields


@dataclasses.dataclass(frozen=True)
class Some:
    """Options of every kind."""

    a: int = 1
    """The first."""
    b: float | None = None
    """A text that
    goes on."""
    c: tuple[str, ...] = ("x", "y")
    """Words."""
    d: bool = True
    """On by itself."""
    e: bool | None = None
    """Either."""
    f: tuple[float, float] = (0.0, 1.0)
    """Two numbers."""


def test_a_page(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    page = help_text(
        Some, "kenpo some", "What it does.\n\n    usual\n      deeper\n", {"one": ("b", Beside("--z", "FILE", "Zed."))}
    )
    assert (
        page
        == f"""usage: kenpo some [--help] [OPTIONS]

What it does.

usual
  deeper

one:
  --b X                   A text that goes on.
  --z FILE                Zed.

{OTHER}:
  --a N                   The first (default: 1)
  --c TEXT ...            Words (default: x y)
  --no-d                  On by itself.
  --e / --no-e            Either.
  --f X X                 Two numbers (default: 0.0 1.0)
"""
    )
    assert "  --a N                   The first (default: 7)" in help_text(Some, "p", "", {}, Some(a=7))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_teaches_by_example_from_the_margin(command, capsys):
    page = help_of(capsys, command)
    if command == "loss":
        assert "\nexamples:\n" in page
    assert re.search(r"^examples:\n  kenpo ", page, flags=re.M)
    assert "\n\n\n" not in page


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["train", "--algoritm", "dapo"], "--algorithm"),
        (["train", "--stpes=3"], "--steps"),
        (["sft", "--micro-batch-tokens", "3"], "--microbatch-tokens"),
        (["eval", "bundled", "--sample", "3"], "--samples"),
        (["sample", "bundled", "--promt", "1+1="], "--prompt"),
        (["list", "--jsn"], "--json"),
        (["check", "--devise", "cpu"], "--device"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(argv, near, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"unknown option '{argv[-2] if len(argv) > 2 else argv[-1].partition('=')[0]}'" in error
    assert f"did you mean {near}" in error
