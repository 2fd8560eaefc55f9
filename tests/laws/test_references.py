"""Every algorithm equals its plain-Python reference in loss and in every coefficient, and meets the recorded cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from reference import REFERENCES, numbers
from reference.cases import make_case

import kenpo
from kenpo.casefile import run_file
from laws.build import tensors
from laws.catalogue import OPTIONS, SETTINGS, algorithm, names, options

pytestmark = pytest.mark.filterwarnings("ignore")
FILES = sorted((Path(__file__).parent.parent / "conformance").glob("*.json"))
COVERED = [n for n in names() if n in REFERENCES]


def close(got: float, want: float) -> bool:
    return math.isfinite(got) and abs(got - want) <= 1e-9 + 1e-9 * abs(want)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recorded_cases(path):
    document = json.loads(path.read_text())
    if document["algorithm"] not in names():
        pytest.skip(f"{document['algorithm']} is not catalogued yet")
    results = run_file(path)["results"]
    assert len(results) == len(document["cases"])
    for result, case in zip(results, document["cases"], strict=True):
        assert close(result["loss"], case["expect"]["loss"])
        for got, want in zip(result["coefficients"], case["expect"]["coefficients"], strict=True):
            assert all(close(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("gap", ["none", "usual", "extreme"])
def test_equals_its_reference(name, gap):
    given = numbers(SETTINGS.get(name, {}))
    for seed in range(7):
        case = make_case(seed, gap=gap, fresh=seed % 4 == 3, no_verdict=seed % 3 == 2, **options(name))
        loss, coefficients, advantages, weights = REFERENCES[name](case, **given)
        result = kenpo.evaluate(algorithm(name), *tensors(case))
        assert close(float(result.loss), loss), seed
        for got, want in (
            (result.coefficients, coefficients),
            (result.advantages, advantages),
            (result.weights, weights),
        ):
            assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-10), seed


def test_the_options_name_catalogued_algorithms():
    assert set(SETTINGS) | set(OPTIONS) <= set(names())
