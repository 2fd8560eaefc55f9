"""What README and docs say works: links lead somewhere, commands and options exist, and examples run."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest
import torch

import kenpo
from kenpo import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code(page: Path, language: str) -> list[str]:
    """The fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def commands(page: Path) -> list[str]:
    """Every `kenpo ...` that a page shows, in a block or in the text."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(kenpo [a-z][^`\n]*)`", text)
    return inline + re.findall(
        r"^(?:torchrun .* -m )?(kenpo [a-z].*?)(?: +#.*)?$", "\n".join(code(page, "bash")), flags=re.M
    )


def test_the_pages_show_commands():
    assert len(commands(ROOT / "README.md")) > 10


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{name(page)}: {target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"(?:`|^ {4}|^)make (?:PYTHON=\S+ )?([a-z-]+)", text, flags=re.M)
    assert set(shown) <= targets


@functools.cache
def help_of(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options_exist(page):
    for line in commands(page):
        command = line.split()[1]
        if command.isupper() or command == "COMMAND":
            continue
        assert command in cli.COMMANDS, f"{name(page)}: {line}"
        for option in re.findall(r" (--[a-z][a-z-]*)", line):
            assert re.search(rf"{option}(?![a-z-])", help_of(command)), f"{name(page)}: {line}: no {option} in the help"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_train_commands_are_understood(page):
    from kenpo.commands.training import read_config

    for line in commands(page):
        words = shlex.split(line)
        if words[1] == "train" and not {"--config", "--resume"} & set(words):  # these read a run that isn't there
            read_config(words[2:])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_compile(page):
    for block in code(page, "python"):
        compile(block, name(page), "exec")


@pytest.mark.parametrize(
    "block", code(ROOT / "docs/guides/own-algorithm.md", "python"), ids=lambda b: b.splitlines()[0]
)
def test_the_algorithm_guide_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = re.match(r"# (\w+\.py)\n", block)
    if not named:
        exec(compile(block, "own-algorithm.md", "exec"), {"__name__": "guide"})
        return
    Path(named[1]).write_text(block, encoding="utf-8")
    (value,) = re.findall(r"^([A-Z]+) = ", block, flags=re.M)
    algorithm = kenpo.load(f"{named[1]}:{value}")
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[0, 1, 1], [0, 1, 0]]), group=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0])
    )
    policy = kenpo.Policy(logp=torch.tensor([[0.0, -1.0, -0.5], [0.0, -0.8, 0.0]], requires_grad=True))
    result = kenpo.evaluate(algorithm, rollouts, policy)
    assert result.coefficients.abs().sum() > 0


def judges_parts(algorithm):
    """The outcome, the parts' sum, is the same for both; the parts are not."""
    parts = {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([0.0, 1.0])}
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[0, 1], [0, 1]]), group=torch.tensor([0, 0]), rewards=torch.ones(2), reward_parts=parts
    )
    result = kenpo.evaluate(algorithm, rollouts, kenpo.Policy(logp=torch.full((2, 2), -1.0)))
    assert result.advantages[:, 1].sign().tolist() == [1.0, -1.0]


@pytest.mark.parametrize("block", code(ROOT / "docs/guides/own-verifier.md", "python"), ids=lambda b: b.splitlines()[0])
def test_the_verifier_guide_runs(block, tmp_path):
    from kenpo.experience.verifiers import Sample, load_verifier

    if block.startswith("# parts.py"):
        (tmp_path / "parts.py").write_text(block, encoding="utf-8")
        judges_parts(kenpo.load(f"{tmp_path}/parts.py:PARTS"))
        return
    (tmp_path / "reward.py").write_text(block, encoding="utf-8")
    with load_verifier(f"{tmp_path}/reward.py:score", workers=1) as verifier:
        right, wrong = verifier.score([Sample(completion="it is 42", answer=42), Sample(completion="no", answer=42)])
    assert (right.reward, wrong.reward) == (1.0, 0.0)
