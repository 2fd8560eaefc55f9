"""Which parts can act under given conditions: told from the declaration, and true of the numbers."""

from __future__ import annotations

import pytest
import torch
from laws.build import same, tensors
from laws.catalogue import algorithm, names, options
from reference.cases import make_case

import kenpo
from kenpo import stages as S


def idle(a, **conditions):
    return [p.part for p in kenpo.acts(a, **conditions) if not p.acts]


@pytest.mark.parametrize(
    ("name", "conditions", "want"),
    [
        ("grpo", {}, ["ratio", "surrogate"]),
        ("grpo", {"updates": 2}, []),
        ("grpo", {"foreign": True, "stale": True}, ["ratio", "surrogate"]),
        ("tis", {}, ["weights.truncated_is", "ratio", "surrogate"]),
        ("tis", {"updates": 4}, ["weights.truncated_is"]),
        ("tis", {"foreign": True}, ["ratio", "surrogate"]),
        ("tis", {"stale": True, "updates": 2}, []),
        ("m2po", {}, ["weights.second_moment", "ratio"]),
        ("m2po", {"stale": True}, []),
        ("rejection", {"updates": 2}, ["weights.rejection"]),
        ("m2po-areal", {"updates": 2}, ["weights.correction_moment"]),
        ("trm-exact", {}, ["weights.sequence_kl_mask", "ratio"]),
        ("reco", {}, ["weights.variance_ratio"]),
        ("rloo", {}, []),
        ("luffy", {}, []),
    ],
)
def test_what_is_idle(name, conditions, want):
    a = kenpo.get(name)
    switched_off = {p.part for p in kenpo.acts(a) if "is not set" in p.why}
    assert [p for p in idle(a, **conditions) if p not in switched_off] == want


def test_every_idle_part_says_what_it_needs():
    for name in kenpo.names():
        for part in kenpo.acts(kenpo.get(name), truncated=False):
            assert part.why
            assert bool(part.needed) is not part.acts, (name, part)


def test_numbers_that_switch_a_part_off_are_named():
    found = {p.part: p for p in kenpo.acts(kenpo.get("grpo").with_settings({"regularizers.kl_to_reference.beta": 0.0}))}
    assert found["regularizers.kl_to_reference"] == (
        "regularizers.kl_to_reference",
        False,
        "beta is 0",
        "another number",
    )
    a = kenpo.get("grpo").adding("untruncated")
    assert "weights.untruncated" in idle(a, truncated=False, updates=2)
    assert idle(a, updates=2) == []


@pytest.mark.filterwarnings("ignore::kenpo.errors.NoDivergenceWarning")
@pytest.mark.parametrize("name", names())
def test_an_idle_weight_changes_no_coefficient(name):
    """On a fresh batch of the trainer's own weights: drop every idle weight, nothing changes."""
    a = algorithm(name)
    silent = {p.part for p in kenpo.acts(a, truncated=True) if not p.acts and p.part.startswith("weights.")}
    if not silent or any(s.carries_correction and getattr(s, "normalise", False) for s in a.weights):
        return
    keep = tuple(s for s in a.weights if f"weights.{S.snake(s)}" not in silent)
    rollouts, policy = tensors(make_case(3, **(options(name) | {"gap": "none", "fresh": False, "sampler_gap": 0.0})))
    if "kl_sampler" in a.needs:
        policy = policy.replace(kl_sampler=torch.zeros_like(policy.logp))
    if "router_logp" in a.needs:
        rollouts = rollouts.replace(router_logp_old=policy.router_logp)
    rollouts = rollouts.replace(logp_sampler=policy.logp, logp_old=policy.logp, logp_prox=policy.logp)
    full, bare = kenpo.evaluate(a, rollouts, policy), kenpo.evaluate(a.but(weights=keep), rollouts, policy)
    assert same(full.coefficients, bare.coefficients)


def test_a_second_update_without_a_ratio_is_biased():
    found = [n for n in kenpo.names() if kenpo.biased(kenpo.get(n), 2)]
    assert {"rloo", "mini_rl-old", "conspo", "opd-prefix"} <= {*found}
    assert not {"ggpo", "gmc_grpo", "reco", "dpo", "reward_model"} & {
        *found
    }  # none, or one that is a weight, is needed
    assert all(kenpo.get(n).ratio is None for n in found)
    assert all(kenpo.biased(kenpo.get(n), 1) is None for n in kenpo.names())
    assert "nothing holds the others near" in kenpo.biased(kenpo.get("rloo"), 4)
    assert "nothing holds" not in kenpo.biased(kenpo.get("mini_rl-old"), 4)  # its gate does
