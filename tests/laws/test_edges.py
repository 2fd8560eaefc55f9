"""Where a comparison is exactly at its edge: what a paper's < or ≤ decides."""

from __future__ import annotations

import math

import pytest
import torch
from reference import REFERENCES

import kenpo

pytestmark = pytest.mark.filterwarnings("ignore")


def two_rows(logp, **fields):
    """A right and a wrong response of the same tokens behind one masked column."""
    rows = {n: [[0.0, *v]] * 2 for n, v in {"logp": logp, "logp_old": logp, "logp_sampler": logp, **fields}.items()}
    policy = {n: rows.pop(n) for n in ("logp", "entropy") if n in rows}
    mask = [[0] + [1] * len(logp)] * 2
    return {"rollouts": {"mask": mask, "group": [0, 0], "rewards": [1.0, 0.0], **rows}, "policy": policy}


def evaluated(name, case):
    def made(fields):
        return {n: v if n in ("mask", "group") else torch.tensor(v, dtype=torch.float64) for n, v in fields.items()}

    rollouts = kenpo.Rollouts(**{n: torch.as_tensor(v) for n, v in made(case["rollouts"]).items()})
    return kenpo.evaluate(kenpo.get(name), rollouts, kenpo.Policy(**made(case["policy"])))


def agrees(name, case):
    result = evaluated(name, case)
    _, coefficients, _, weights = REFERENCES[name](case)
    assert torch.allclose(result.coefficients, torch.tensor(coefficients, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(result.weights, torch.tensor(weights, dtype=torch.float64), atol=1e-12)
    return result.weights


def test_a_single_candidate_is_its_own_quantile_and_stays():
    logp = [math.log(0.001), -0.5, -0.7]
    assert agrees("stapo", two_rows(logp, entropy=[0.1, 0.4, 0.9])).sum() == 6


def test_the_confident_one_of_two_candidates_goes():
    logp = [math.log(0.001), math.log(0.0015), -0.7]
    weights = agrees("stapo", two_rows(logp, entropy=[0.1, 0.4, 0.9]))
    assert weights[0].tolist() == [0, 0, 1, 1]
    assert weights[1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("rho", "kept"), [(0.5, True), (0.4999, False), (2.0, True), (2.0001, False)])
def test_mis_keeps_its_bounds(rho, kept):
    case = two_rows([-1.0])
    case["rollouts"]["logp_sampler"] = [[0.0, -1.0 - math.log(rho)]] * 2
    assert bool(evaluated("mis", case).weights.any()) == kept


@pytest.mark.parametrize("over", [0.1499, 0.1501])
def test_dppo_keeps_what_equals_its_threshold(over):
    case = two_rows([math.log(0.4 + over)])
    case["rollouts"]["logp_sampler"] = [[0.0, math.log(0.4)]] * 2
    weights = agrees("dppo", case)
    assert weights[:, 1].tolist() == [1.0 if over < 0.15 else 0.0, 1.0]


@pytest.mark.parametrize("far", [-60.0, 60.0])
def test_one_outlier_is_held_on_either_side(far):
    case = two_rows([-100.0, -0.5])
    case["rollouts"]["logp_old"] = [[0.0, -100.0 - far if far < 0 else -160.0, -0.5]] * 2
    result = evaluated("grpo", {**case, "rollouts": {**case["rollouts"], "logp_ref": case["policy"]["logp"]}})
    assert not bool(result.coefficients[:, 1].any())  # saturated: no gradient at ±20
    assert result.metrics["ratio_max"] <= math.exp(20) * (1 + 1e-12)
