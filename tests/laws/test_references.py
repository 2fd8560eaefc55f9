"""Every algorithm equals its plain-Python reference in loss and in every coefficient, and meets the recorded cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from reference.cases import make_case

import kenpo
from kenpo.casefile import run_file
from laws.build import tensors
from laws.catalogue import OPTIONS, SETTINGS, algorithm, names, options
from laws.references import ALL, WITHOUT_ADVANTAGES, reference

pytestmark = pytest.mark.filterwarnings("ignore")
FILES = sorted((Path(__file__).parent.parent / "conformance").glob("*.json"))
KINDS = {
    "none": {"gap": "none"},
    "usual": {},
    "extreme": {"gap": "extreme"},
    "fresh": {"fresh": True},
    "no_verdict": {"no_verdict": True},
}


def close(got: float, want: float) -> bool:
    return math.isfinite(got) and abs(got - want) <= 1e-9 + 1e-9 * abs(want)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recorded_cases(path):
    document = json.loads(path.read_text())
    assert document["algorithm"] in names()
    results = run_file(path)["results"]
    assert len(results) == len(document["cases"])
    for result, case in zip(results, document["cases"], strict=True):
        assert close(result["loss"], case["expect"]["loss"])
        for got, want in zip(result["coefficients"], case["expect"]["coefficients"], strict=True):
            assert all(close(x, y) for x, y in zip(got, want, strict=True))


def compared(name, seed, **kind):
    case = make_case(seed, **(kind | options(name)))
    loss, coefficients, advantages, weights, *more = reference(name, case)
    result = kenpo.evaluate(algorithm(name), *tensors(case))
    assert close(float(result.loss), loss), seed
    pairs = [(result.coefficients, coefficients), (result.weights, weights)]
    if name not in WITHOUT_ADVANTAGES:
        pairs.append((result.advantages, advantages))
    pairs += [(result.gradients[field], slopes) for field, slopes in (more[0] if more else {}).items()]
    for got, want in pairs:
        assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-10), seed


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_reference(name, kind):
    for seed in range(3):
        compared(name, seed, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_equals_its_reference_on_many(name):
    for seed in range(300):
        compared(name, seed, **KINDS[list(KINDS)[seed % len(KINDS)]])


def test_every_algorithm_has_a_reference():
    assert sorted(set(names()) - ALL.keys()) == []


def test_the_options_name_catalogued_algorithms():
    assert set(SETTINGS) | set(OPTIONS) <= set(names())
