"""Who may import whom, how long a file may be, and that what is public is documented. Read from the source by `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[1] / "src"

FOUNDATION = {"types", "fields", "errors", "jsonfile", "kinds", "terminal", "seeds", "episode", "divergence", "nested",
              "contexts", "options"}  # fmt: skip
OBJECTIVE = FOUNDATION | {"ops", "stages", "settings", "metrics", "checks", "order", "algorithm"}
CATALOGUE = {"algorithms", "loading", "casefile"}
MACHINERY = {"batches", "preference", "models", "engines", "experience", "ranks", "runs", "learner"}
EVERYTHING = {"*"}

# Part of the package -> the parts it may import (itself always). A part is a folder or a file right under kenpo/.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "terminal": set(),
    "fields": {"errors"},
    "types": {"errors", "fields"},
    "jsonfile": {"errors"},
    "divergence": {"errors"},
    "seeds": set(),
    "kinds": {"errors"},
    "nested": {"errors"},
    "options": {"errors"},
    "presets": set(),
    "contexts": {"errors", "fields", "types"},
    "episode": {"errors"},
    "ranks": FOUNDATION | {"batches"},
    "ops": FOUNDATION,
    "batches": FOUNDATION,
    "stages": FOUNDATION | {"ops"},
    "settings": FOUNDATION | {"stages"},
    "metrics": FOUNDATION | {"ops", "stages"},
    "checks": FOUNDATION | {"ops", "stages"},
    "order": FOUNDATION | {"ops", "stages", "checks", "metrics"},
    "algorithm": OBJECTIVE,
    "algorithms": OBJECTIVE,
    "conditions": OBJECTIVE,
    "schedules": OBJECTIVE,
    "hosts": OBJECTIVE,
    "loading": OBJECTIVE | {"algorithms"},
    "casefile": OBJECTIVE | {"algorithms", "loading"},
    "preference": OBJECTIVE,
    "models": FOUNDATION | {"ops"},
    "engines": FOUNDATION | {"ops", "models"},
    "experience": FOUNDATION | {"batches", "ranks", "models", "engines", "ops"},
    "runs": FOUNDATION | {"batches", "models"},
    "learner": OBJECTIVE | {"models", "ranks", "conditions", "schedules"},
    "trainer": OBJECTIVE | MACHINERY | {"conditions", "schedules"},
    "lab": OBJECTIVE | CATALOGUE | MACHINERY | {"trainer"},
    "integrations": OBJECTIVE | CATALOGUE | {"batches", "preference", "hosts"},
    "commands": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": {"cli"},
    "__init__": EVERYTHING,
}
# The one door to the catalogue on the trainer's side: it turns a configuration's name into an Algorithm.
DOORS = {("trainer/setup.py", "loading"), ("trainer/sources.py", "loading")}
NEVER = {"recipes", "tests", "benchmarks"}
FRONT = {"cli", "commands", "__main__"}  # only these import one another

# What engines, models and experience may use of ops: reading log-probs off a model is theirs, losses are not.
LOSS_OPS = {"ratios", "surrogates", "divergences", "trust", "returns", "groups"}

# Optional dependencies -> what the one file that may import them at module level begins with (None: in functions only).
OPTIONAL: dict[str, str | None] = {
    "wandb": None, "trackio": None, "tensorboard": None, "torch.utils.tensorboard": None,
    "reasoning_gym": None, "math_verify": None, "datasets": None,
    "peft": "models/lora.py", "vllm": "engines/vllm.py", "ray": "engines/ray.py",
    "trl": "integrations/trl.py", "verl": "integrations/verl",  # verl.py and verl_trainer.py
}  # fmt: skip

LONGEST = {"trainer/loop.py": 300}
LONGEST_ALGORITHM, LONGEST_FILE = 60, 400
LONGEST_TRAINER = 1500  # all of it together: it puts parts together, subjects live in their packages


class Import(NamedTuple):
    """One imported module, as an absolute dotted name."""

    target: str
    line: int
    at_module_level: bool


def sources(src: Path) -> Iterator[tuple[str, Path]]:
    """Every source file with its path inside the package."""
    for path in sorted((src / "kenpo").rglob("*.py")):
        yield path.relative_to(src / "kenpo").as_posix(), path


def public_names(src: Path) -> dict[str, str]:
    """Where the lazy names of `kenpo` live: {"get": "kenpo.algorithms", ...}, read from its `_WHERE`."""
    for node in ast.parse((src / "kenpo/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WHERE":
            return {name: module for module, names in ast.literal_eval(node.value).items() for name in names}
    return {}


def imports(path: Path, src: Path) -> list[Import]:
    """All imports but those for type checkers only. `kenpo.get` counts as an import of where `get` lives."""
    package = path.relative_to(src).with_suffix("").parts[:-1]
    found: list[Import] = []
    public = public_names(src)

    def place(stem: str, name: str) -> str:
        inner = f"{stem}.{name}"
        return inner if _is_module(inner, src) else public.get(name, stem) if stem == "kenpo" else stem

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.orelse:
                visit(statement, top)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(name.name, node.lineno, top) for name in node.names if name.name != "kenpo")
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            targets = dict.fromkeys(place(stem, name.name) for name in node.names)  # one per module
            found.extend(Import(target, node.lineno, top) for target in targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kenpo":
            found.append(Import(place("kenpo", node.attr), node.lineno, top))
        inside = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def _is_module(dotted: str, src: Path) -> bool:
    place = src.joinpath(*dotted.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def layering_breaches(src: Path) -> list[str]:
    """One line per import that goes against the layers."""
    breaches = []
    for name, path in sources(src):
        part = name.split("/")[0].removesuffix(".py")
        if part not in ALLOWED:
            breaches.append(f"{name}: kenpo.{part} has no place in the layers yet; give it one in ALLOWED")
            continue
        for target, line, _ in imports(path, src):
            head, *rest = target.split(".")
            where = f"{name}:{line}"
            if head in NEVER:
                breaches.append(f"{where} imports {target}: nothing imports {head}")
            if head != "kenpo":
                continue
            other = rest[0] if rest else "kenpo"
            allowed = ALLOWED[part]
            if other != part and (other in FRONT and part not in FRONT):
                breaches.append(f"{where} imports {target}: only the command line imports {other}")
            elif other not in allowed | {part} and allowed != EVERYTHING and (name, other) not in DOORS:
                breaches.append(f"{where} imports {target}: {part} may import {sorted(allowed) or 'nothing'}")
            elif part in {"models", "engines", "experience"} and other == "ops" and rest[1:2] and rest[1] in LOSS_OPS:
                breaches.append(f"{where} imports {target}: {part} knows no losses")
    return breaches


def dependency_breaches(src: Path) -> list[str]:
    """One line per optional dependency that is imported when a module is loaded, outside the file that owns it."""
    breaches = []
    for name, path in sources(src):
        for target, line, top in imports(path, src):
            for package, owner in OPTIONAL.items():
                if (
                    top
                    and (target == package or target.startswith(package + "."))
                    and not (owner and name.startswith(owner))
                ):
                    breaches.append(
                        f"{name}:{line} imports {target} at module level; move it into the function that uses it"
                    )
    return breaches


FUNCTION_LIKE = {"NamedTuple", "torch.autograd.Function"}  # several results; a function with its own backward


def foreign_ops(src: Path) -> list[str]:
    """One line per thing in ops/ that is not a tensor function on torch and the standard library."""
    breaches = []
    for name, path in sources(src):
        if not name.startswith("ops/"):
            continue
        for target, line, _ in imports(path, src):
            head = target.split(".")[0]
            if head not in {"torch", "kenpo"} and head not in sys.stdlib_module_names:
                breaches.append(f"{name}:{line} imports {target}: ops know torch only")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not {ast.unparse(b) for b in node.bases} & FUNCTION_LIKE:
                breaches.append(f"{name}:{node.lineno} class {node.name}: ops hold functions, no classes")
    return breaches


def overlong(src: Path) -> list[str]:
    """One line per file above its limit, and one for trainer/ as a whole."""
    found, together = [], 0
    for name, path in sources(src):
        declaration = name.startswith("algorithms/") and not name.endswith("__init__.py")
        limit = LONGEST.get(name, LONGEST_ALGORITHM if declaration else LONGEST_FILE)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            found.append(f"{name}: {lines} lines, {limit} allowed")
        together += lines if name.startswith("trainer/") else 0
    if together > LONGEST_TRAINER:
        found.append(f"trainer/: {together} lines, {LONGEST_TRAINER} allowed")
    return found


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Public methods; properties and the like are told by their class."""
    functions = [m for m in node.body if isinstance(m, ast.FunctionDef)]
    return [m for m in functions if not m.name.startswith("_") and not m.decorator_list]


def undocumented(src: Path) -> list[str]:
    """One line per public module, class, function or method without a docstring.

    Methods inherit theirs from a base class, or from a class in the same file with a method of that name (a protocol).
    """
    found = []
    for name, path in sources(src):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and not ast.get_docstring(tree) and name != "__main__.py":
            found.append(f"{name}: no module docstring")
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        described = {m.name for c in classes for m in _methods(c) if ast.get_docstring(m)}
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                found.append(f"{name}:{node.lineno} {node.name}: no docstring")
            if isinstance(node, ast.ClassDef) and not node.bases:
                found += [f"{name}:{m.lineno} {node.name}.{m.name}: no docstring"
                          for m in _methods(node) if not ast.get_docstring(m) and m.name not in described]  # fmt: skip
    return found


CHECKS = {
    "layers": layering_breaches,
    "optional dependencies": dependency_breaches,
    "ops": foreign_ops,
    "length": overlong,
    "docstrings": undocumented,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_source_keeps_the_house_rules(check):
    found = check(SRC)
    assert not found, "\n" + "\n".join(found)


PLANTED = [
    ("stages/a.py", "from kenpo.trainer import loop", layering_breaches),
    ("stages/a.py", "def f():\n    from kenpo.engines.hf import HFEngine", layering_breaches),
    ("stages/a.py", "from ..experience import tasks", layering_breaches),
    ("runs/a.py", "from kenpo.trainer.config import TrainConfig", layering_breaches),
    ("experience/a.py", "import kenpo\nP = kenpo.prepare", layering_breaches),
    ("stages/a.py", "import kenpo\nA = kenpo.get('grpo')", layering_breaches),
    ("stages/a.py", "import kenpo\nA = kenpo.trainer", layering_breaches),
    ("ops/a.py", "from kenpo.stages.base import Stage", layering_breaches),
    ("algorithm.py", "from kenpo.algorithms import grpo", layering_breaches),
    ("algorithms/a.py", "import kenpo.trainer.loop", layering_breaches),
    ("trainer/a.py", "from kenpo.algorithms.grpo import GRPO", layering_breaches),
    ("trainer/a.py", "from kenpo import get", layering_breaches),
    ("trainer/a.py", "from kenpo import algorithms", layering_breaches),
    ("trainer/a.py", "from kenpo.loading import resolve", layering_breaches),
    ("engines/a.py", "from kenpo.ops.surrogates import clipped", layering_breaches),
    ("engines/a.py", "from kenpo.ops import surrogates", layering_breaches),
    ("models/a.py", "from kenpo.stages import Clip", layering_breaches),
    ("trainer/a.py", "from recipes import addition", layering_breaches),
    ("trainer/a.py", "from kenpo.commands import training", layering_breaches),
    ("cellar/a.py", "from kenpo import types", layering_breaches),
    ("trainer/a.py", "import wandb", dependency_breaches),
    ("trainer/a.py", "try:\n    from torch.utils.tensorboard import X\nfinally:\n    pass", dependency_breaches),
    ("experience/a.py", "from math_verify.parser import parse", dependency_breaches),
    ("engines/a.py", "class A:\n    import vllm", dependency_breaches),
    ("ops/a.py", "import numpy", foreign_ops),
    ("ops/a.py", "class A:\n    pass", foreign_ops),
    ("algorithms/a.py", "\n" * 61, overlong),
    ("trainer/loop.py", "\n" * 301, overlong),
    ("cli.py", "\n" * 401, overlong),
    ("cli.py", "def public():\n    pass", undocumented),
    ("cli.py", "class Public:\n    '''Said.'''\n\n    def unsaid(self):\n        pass", undocumented),
]  # fmt: skip
HARMLESS = [
    ("trainer/a.py", "import kenpo\nP = kenpo.prepare"),
    ("stages/a.py", "from kenpo.ops import ratios\nfrom kenpo.types import Rollouts\nfrom . import base"),
    ("trainer/a.py", "def f():\n    import wandb\n    from kenpo.algorithm import Algorithm"),
    ("trainer/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb"),
    ("engines/vllm.py", "import vllm\nfrom kenpo.ops.logprobs import token_logp"),
]


def _package(folder: Path, name: str, text: str) -> Path:
    for part in (*ALLOWED, "ops/surrogates", "ops/ratios", "stages/base"):
        file = (
            folder / "kenpo" / (part + ".py" if part in ("cli", "algorithm") or "/" in part else part + "/__init__.py")
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    lazy = '_WHERE = {"kenpo.algorithm": ("prepare",), "kenpo.algorithms": ("get",)}\n'
    (folder / "kenpo/__init__.py").write_text('"""A package."""\n' + lazy, encoding="utf-8")
    file = folder / "kenpo" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('"""A module."""\n' + text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("name", "text", "check"), PLANTED)
def test_a_planted_breach_is_caught(tmp_path, name, text, check):
    found = check(_package(tmp_path, name, text))
    assert len(found) == 1
    assert name in found[0] or name.split("/")[0] in found[0]


@pytest.mark.parametrize(("name", "text"), HARMLESS)
def test_what_is_allowed_is_let_through(tmp_path, name, text):
    src = _package(tmp_path, name, text)
    assert [line for check in (layering_breaches, dependency_breaches, foreign_ops) for line in check(src)] == []


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    return set(out.splitlines()[-1].split())


def test_importing_kenpo_loads_nothing_heavy():
    heavy = {"transformers", "datasets", "matplotlib", "tyro", "rich", "reasoning_gym", "math_verify", "peft", "wandb"}
    assert not _loaded_after("import kenpo") & heavy


def test_help_loads_no_heavy_package():
    loaded = _loaded_after(
        "import contextlib, io, kenpo.cli\nwith contextlib.redirect_stdout(io.StringIO()): kenpo.cli.main(['--help'])"
    )
    assert not loaded & {"transformers", "datasets", "matplotlib"}


def test_every_public_name_is_documented():
    import kenpo

    names = getattr(kenpo, "__all__", [n for n in vars(kenpo) if not n.startswith("_")])
    bare = [n for n in names if not (getattr(kenpo, n).__doc__ or "").strip()]
    assert not bare


def test_the_trainer_is_measured_as_a_whole(tmp_path):
    for name in "abcd":
        _package(tmp_path, f"trainer/{name}.py", "\n" * 399)
    assert overlong(tmp_path) == ["trainer/: 1600 lines, 1500 allowed"]
