"""Each row of the table in docs/guides/answers.md, under each verifier that it names."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

from kenpo.experience.verifiers import Sample, load_verifier

pytest.importorskip("math_verify")
GUIDE = Path(__file__).parents[2] / "docs/guides/answers.md"
ALL = ("exact", "numeric", "gsm8k", "math_verify")


def code(cell):
    """A cell's text between its backticks; a double pair may hold backticks and blanks."""
    cell = cell.strip()
    ticks = re.match(r"`+", cell)[0]
    inner = cell[len(ticks) : -len(ticks)]
    return (inner.rstrip(" ") if len(ticks) > 1 else inner).replace("⏎", "\n")


def rows():
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split(" | ")
        if line.startswith("| ") and len(cells) == 5 and "`" in cells[1]:
            rule, completion, gold, names, earns = cells
            text = code(gold)
            gold = json.loads(text) if text[0] == "[" or text in ("true", "false") else text
            listed = ALL if names.strip() == "all" else tuple(name.strip() for name in names.split(","))
            reward = {"1": 1.0, "0": 0.0, "–": math.nan}[earns.strip()]
            for name in listed:
                yield name, rule.strip(), code(completion), gold, reward


def test_every_row_earns_what_the_table_says():
    by_verifier = defaultdict(list)
    for name, *row in rows():
        by_verifier[name].append(row)
    assert set(by_verifier) == set(ALL)
    assert sum(map(len, by_verifier.values())) > 150
    wrong = []
    for name, listed in by_verifier.items():
        with load_verifier(name) as verifier:
            verdicts = verifier.score([Sample(completion=text, answer=gold) for _, text, gold, _ in listed])
        for (rule, text, gold, reward), verdict in zip(listed, verdicts, strict=True):
            if not (verdict.reward == reward or (math.isnan(reward) and verdict.status == "abstain")):
                wrong.append((name, rule, text, gold, reward, verdict))
    assert wrong == []
