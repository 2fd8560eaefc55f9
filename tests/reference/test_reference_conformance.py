"""Every reference gives the expected loss and coefficients of every conformance case of its algorithm."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from reference import REFERENCES, numbers

FILES = sorted((Path(__file__).parent.parent / "conformance").glob("*.json"))


def close(got: float, want: float) -> bool:
    return math.isfinite(got) and abs(got - want) <= 1e-9 + 1e-9 * abs(want)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_reference_meets_the_cases(path):
    doc = json.loads(path.read_text())
    assert doc["cases"]
    for k, case in enumerate(doc["cases"]):
        loss, coefficients, _, _ = REFERENCES[doc["algorithm"]](case, **numbers(doc["settings"]))
        assert close(loss, case["expect"]["loss"]), f"case {k}: loss {loss}, expected {case['expect']['loss']}"
        for b, row in enumerate(case["expect"]["coefficients"]):
            for t, want in enumerate(row):
                assert close(coefficients[b][t], want), f"case {k} [{b}][{t}]: {coefficients[b][t]}, expected {want}"


def test_every_case_file_was_found():
    assert len(FILES) >= 37
