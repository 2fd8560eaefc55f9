"""What the documents advise for extras leaves the torch that is there: pip's own dry run beside another torch.

The environment is empty but for the metadata of a torch, which is all that pip looks at. Needs the package index.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - {"dev"})
ADVICE = re.compile(r"pip install ([^`\n#;]*)")


def advised():
    """Every `pip install` of README, guides and messages but those of the pinned set-up: what is installed."""
    found = set()
    for path in [ROOT / "README.md", *ROOT.glob("docs/guides/*.md"), *ROOT.glob("src/**/*.py")]:
        for words in ADVICE.findall(path.read_text()):
            if "-c constraints.txt" not in words and "{" not in words:
                found.update(re.findall(r"\.\[[a-z,]+\]|^\.(?=\s|$)", words))
    return found


def test_each_extra_is_advised_and_by_no_pin():
    named = {name for words in advised() for name in re.findall(r"[a-z]+", words)}
    assert named <= set(EXTRAS)
    assert "tasks" in named
    assert "lora" in named


@pytest.mark.slow
@pytest.mark.parametrize("held", ["2.7.1", "2.12.0+cu130"])
@pytest.mark.parametrize("what", ["."] + [f".[{name}]" for name in EXTRAS])
def test_a_dry_run_names_no_torch(what, held, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=120)
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    info = site / f"torch-{held}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {held}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")
    command = [sys.executable, "-m", "pip", "--python", tmp_path / "env/bin/python", "install", "--dry-run", "--quiet",
               "--disable-pip-version-check", "--report", tmp_path / "report.json", what]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    names = {item["metadata"]["name"].lower() for item in report["install"]}
    assert "kenpo" in names
    assert "transformers" in names
    assert "torch" not in names
    assert not [name for name in names if name.startswith("nvidia-")]
