"""Clip fractions against counting by hand: by side, over the trained tokens of selected rollouts."""

from __future__ import annotations

import math

import pytest
from reference.cases import make_case

import kenpo
from laws.build import tensors

pytestmark = pytest.mark.filterwarnings("ignore")

#: Name -> does the bound act on (log-ratio, advantage)?
BOUNDS = {
    "dapo": lambda d, a: (a > 0 and math.exp(d) > 1.28, a < 0 and math.exp(d) < 0.8),
    "gmpo": lambda d, a: (a > 0 and d > 0.4, a < 0 and d < -0.4),
    "gppo-dual": lambda d, a: (a > 0 and math.exp(d) > 1.28, a < 0 and math.exp(d) < 0.8),
    "cispo-floor": lambda d, a: (a > 0 and not 0.8 <= math.exp(d) <= 1.2, a < 0 and not 0.8 <= math.exp(d) <= 1.2),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("gap", ["usual", "extreme"])
def test_clip_fractions(name, gap):
    for seed in range(6):
        rollouts, policy = tensors(make_case(seed, gap=gap))
        result = kenpo.evaluate(kenpo.get(name), rollouts, policy)
        trained = rollouts.mask & kenpo.select(kenpo.get(name), rollouts).unsqueeze(-1)
        d = (policy.logp - rollouts.logp_old).clamp(-20, 20)[trained].tolist()
        sides = [BOUNDS[name](*pair) for pair in zip(d, result.advantages[trained].tolist(), strict=True)]
        for side, word in enumerate(("clip_high", "clip_low")):
            want = sum(s[side] for s in sides) / len(sides) if sides else math.nan
            got = result.metrics[word]
            assert math.isclose(got, want, abs_tol=1e-12) or (math.isnan(want) and math.isnan(got)), (seed, word)


def test_divergences_are_token_means_of_k3_and_k1():
    for seed in range(5):
        rollouts, policy = tensors(make_case(seed))
        metrics = kenpo.evaluate(kenpo.get("tis"), rollouts, policy).metrics
        own = rollouts.mask & ~rollouts.elsewhere.unsqueeze(-1)  # the sampler wrote these
        for name, anchor, where in (
            ("old", rollouts.logp_old, rollouts.mask), ("sampler", rollouts.logp_sampler, own),
        ):  # fmt: skip
            x = (policy.logp - anchor)[where].clamp(-20, 20)
            assert math.isclose(metrics[f"kl_{name}"], float((x.expm1() - x).mean()), rel_tol=1e-12)
            assert math.isclose(metrics[f"kl_{name}_k1"], float((-x).mean()), rel_tol=1e-12)
        gap = (rollouts.logp_old - rollouts.logp_sampler)[own].abs().max()
        assert math.isclose(metrics["sampler_gap"], float(gap), rel_tol=1e-12)
