"""The list of planted faults is in step with the source, and its runner tells the caught from the unnoticed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _runner():
    spec = importlib.util.spec_from_file_location("mutant_runner", ROOT / "tests/mutants/run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


runner = _runner()
MUTANTS = runner.read_mutants(ROOT / "tests/mutants/mutants.toml")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_each_fault_still_fits_the_source(mutant):
    compile(mutant.applied(ROOT), mutant.file, "exec")
    for test in mutant.tests:
        assert (ROOT / test.split("::")[0]).is_file(), f"{test} is gone"


def test_names_are_unique():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


LIST = """
[[mutant]]
name = "noticed"
file = "src/kenpo/__init__.py"
old = "a + b"
new = "a - b"
tests = ["tests/test_sum.py::test_sum"]
[[mutant]]
name = "unnoticed"
file = "src/kenpo/__init__.py"
old = "a + b"
new = "b + a"
tests = ["tests/test_sum.py::test_sum"]
[[mutant]]
name = "outdated"
file = "src/kenpo/__init__.py"
old = "a * b"
new = "a - b"
tests = ["tests/test_sum.py::test_sum"]
[[mutant]]
name = "unreadable"
file = "src/kenpo/__init__.py"
old = "a + b"
new = "a +"
tests = ["tests/test_sum.py::test_sum"]
"""


def test_the_runner_reports_survivors_and_broken_entries(tmp_path, capsys):
    for name, text in {
        "src/kenpo/__init__.py": "def total(a, b):\n    return a + b\n",
        "tests/test_sum.py": "import kenpo\n\n\ndef test_sum():\n    assert kenpo.total(2, 1) == 3\n",
        "tests/mutants/mutants.toml": LIST,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert runner.main([], root=tmp_path) == 1
    words = {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines()[:4]}
    assert words == {"noticed": "caught", "unnoticed": "SURVIVED", "outdated": "BROKEN", "unreadable": "BROKEN"}
    assert (tmp_path / "src/kenpo/__init__.py").read_text(encoding="utf-8").endswith("a + b\n")  # the tree is untouched
    assert runner.main(["-k", "nothing"], root=tmp_path) == 2
