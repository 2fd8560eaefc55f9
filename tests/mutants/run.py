"""Plants each fault of `mutants.toml` in a copy of src/ and sees whether a test notices: `make mutants`.

The working tree is never touched. Exit status 1 if a fault goes unnoticed, if its old text isn't in the file exactly
once, or if the named tests don't run (or fail without the fault).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Runs pytest on the copy, and makes sure that it is the copy that is imported.
PROGRAM = """
import sys, kenpo, pytest
assert list(kenpo.__path__)[0].startswith(sys.argv[1]), f"{list(kenpo.__path__)} is not the copy in {sys.argv[1]}"
sys.exit(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in `file`; at least one of `tests` (pytest node ids) has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    def applied(self, root: Path) -> str:
        """The faulty text of the file; ValueError if the old text isn't there exactly once, or nothing changes."""
        path = root / self.file
        if not self.file.startswith("src/") or not path.is_file():
            raise ValueError(f"{self.file} is no file under src/")
        text = path.read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"old text stands {found} times in {self.file}, not once")
        if self.old == self.new:
            raise ValueError("old and new text are the same")
        return text.replace(self.old, self.new)


def read_mutants(path: Path) -> list[Mutant]:
    """The list in a TOML file of `[[mutant]]` tables."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def run_tests(root: Path, tests: list[str], changed: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """pytest's exit status (None: it ran out of time) and output on a copy of src/ in which some files are changed."""
    with tempfile.TemporaryDirectory(prefix="kenpo-mutant-") as folder:
        copy = Path(folder).resolve() / "src"
        shutil.copytree(root / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file, text in changed.items():
            copy.parent.joinpath(file).write_text(text, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, str(copy), *tests]
        try:
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant, root: Path, seconds: float) -> tuple[str, str]:
    """ "caught", "SURVIVED", "TIMEOUT" or "BROKEN", and a remark."""
    try:
        text = mutant.applied(root)
    except ValueError as error:
        return "BROKEN", str(error)
    status, output = run_tests(root, list(mutant.tests), {mutant.file: text}, seconds)
    if status is None:
        return "TIMEOUT", "no verdict within the time limit; raise --seconds, or have the test notice it itself"
    if status == 1 and "FAILED" in output:
        return "caught", ""
    if status == 0:
        return "SURVIVED", "no test noticed: " + mutant.why
    return "BROKEN", f"the tests did not run (pytest status {status}): {(output.strip().splitlines() or ['?'])[-1]}"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the list; prints one line per fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only faults whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="time limit for each fault")
    args = parser.parse_args(argv)
    mutants = [m for m in read_mutants(root / "tests/mutants/mutants.toml") if args.k in m.name or args.k in m.file]
    if not mutants:
        print(f"no fault matches {args.k!r}", file=sys.stderr)
        return 2
    tests = sorted({test for m in mutants for test in m.tests})
    status, output = run_tests(root, tests, {}, args.seconds * len(mutants))
    if status != 0:
        print(output, f"without any fault the named tests must pass (pytest status {status})", sep="\n")
        return 1
    bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, (word, remark) in zip(
            mutants, pool.map(lambda m: verdict(m, root, args.seconds), mutants), strict=True
        ):
            bad += word != "caught"
            print(f"{word:<9} {mutant.name:<40} {mutant.file}  {remark}".rstrip(), flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} faults caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
