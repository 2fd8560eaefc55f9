"""The project file, the licence, the wheel and the pins agree with one another."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [
    Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line.strip()
]


def test_torch_is_pinned_and_is_what_is_installed():
    assert [pin.name for pin in PINS] == ["torch"]
    installed = Version(metadata.version("torch"))
    assert installed in PINS[0].specifier, f"torch {installed} was installed in place of {PINS[0]}"
    declared = next(Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch>"))
    assert installed.public in declared.specifier


def test_versions_and_licence_agree():
    assert metadata.version("kenpo") == PROJECT["version"]
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_core_dependencies_stay_small():
    core = {Requirement(line).name for line in PROJECT["dependencies"]}
    heavy = {
        "datasets",
        "math-verify",
        "reasoning-gym",
        "peft",
        "trl",
        "verl",
        "vllm",
        "ray",
        "liger-kernel",
        "triton",
        "wandb",
    }
    assert not core & heavy


def test_help_and_version_work_as_a_command():
    for args, word in ((["--help"], "train"), (["--version"], PROJECT["version"])):
        done = subprocess.run([sys.executable, "-m", "kenpo", *args], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert word in done.stdout


def test_the_console_command_points_to_something():
    (entry,) = [e for e in metadata.entry_points(group="console_scripts") if e.name == "kenpo"]
    assert callable(entry.load())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """Names in a wheel built from a copy of the sources, with what is installed here (no network)."""
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        "out",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "out").glob("*.whl")
    return zipfile.ZipFile(built).namelist()


def test_the_wheel_holds_every_file_of_the_package(wheel):
    package = ROOT / "src" / "kenpo"
    kept = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    missing = {p.relative_to(ROOT / "src").as_posix() for p in kept} - set(wheel)
    assert not missing, f"not in the wheel: {sorted(missing)} (see package-data in pyproject.toml)"
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert tops == {"kenpo", f"kenpo-{PROJECT['version']}.dist-info"}


@pytest.mark.slow
def test_pip_install_gives_a_working_command(tmp_path):
    """`pip install .` into a fresh environment that sees this one's packages: the command starts from the wheel."""
    skip = shutil.ignore_patterns(".git", ".venv", ".cache", ".peers", "runs", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=skip)
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "env"], check=True, timeout=120)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", tmp_path / "checkout"], check=True, timeout=300)
    site = next(p for p in sys.path if p.endswith("site-packages"))  # torch and transformers, from here
    (next((tmp_path / "env").glob("lib/python3*/site-packages")) / "here.pth").write_text(site, encoding="utf-8")
    code = "import kenpo; print(list(kenpo.__path__)[0])"
    where = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert where.startswith(str(tmp_path / "env"))
    out = subprocess.run(
        [tmp_path / "env/bin/kenpo", "--help"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "train" in out.stdout
