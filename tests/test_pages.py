"""The catalogue's pages say what the declarations say, and nothing is catalogued without a page and a note."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import kenpo
from kenpo.algorithms import READING_ORDER
from kenpo.commands.notes import NOTES
from kenpo.commands.objectives import family, parent

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_pages", ROOT / "docs" / "build_pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_declaration_has_a_note():
    assert set(NOTES) == set(READING_ORDER)


def test_pages_are_up_to_date(builder):
    assert builder.stale() == [], "run `make docs`"


def test_links_point_into_their_files(builder):
    for page in builder.PAGES.glob("*.md"):
        for target, line in re.findall(r"\]\(([^)#]+\.py)#L(\d+)\)", page.read_text(encoding="utf-8")):
            assert int(line) <= len((page.parent / target).read_text(encoding="utf-8").splitlines()), (
                page.name,
                target,
            )


def test_every_detail_names_tests_of_its_own(builder):
    stages = {type(s) for n in kenpo.names() for s in builder._stages(kenpo.get(n))}
    assert len(stages) > 50
    for cls in stages:
        found = builder.tests_of(cls)
        assert found, cls
        for node in found:
            path, _, name = node.split("[")[0].partition("::")  # a planted fault may name a whole file
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8") if name else (ROOT / path).is_file(), (
                node
            )


def test_drawings_are_small(builder):
    drawings = list(builder.PAGES.glob("*.svg"))
    assert len(drawings) > 20
    assert all(p.stat().st_size < 30_000 for p in drawings)


def test_ancestry():
    assert parent("grpo") is None
    assert parent("luspo") == "gspo"
    assert parent("dhpo-plain") == "dhpo"
    assert family("trm") == ["trm", "trm-both", "trm-kept", "trm-exact"]
