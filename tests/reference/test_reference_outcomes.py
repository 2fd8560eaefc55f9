"""Critic, reward, advantage and pair references against the golden numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from reference import batch as B
from reference import mixed_policy, outcomes, pairwise, values
from reference.batch import Batch
from reference.scalar import Value, gradients, stop

GOLDEN = Path(__file__).parent.parent / "golden"


def cases(name):
    doc = json.loads((GOLDEN / f"{name}.json").read_text())
    return [pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in doc]


def same(got, want, rel=1e-9, abs_tol=1e-12):
    if isinstance(want, dict):
        for k, w in want.items():
            same(got[k], w, rel, abs_tol)
    elif isinstance(want, list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w, rel, abs_tol)
    elif isinstance(want, (float, int)) and not isinstance(want, bool):
        assert math.isclose(stop(got), want, rel_tol=rel, abs_tol=abs_tol), (got, want)
    else:
        assert got == want


def case_of(i, **policy):
    n = len(i["mask"])
    names = ("logp_old", "logp_ref", "values_old", "token_rewards")
    rollouts = {"mask": i["mask"], "group": [0] * n, "rewards": i.get("scores", [0.0] * n)}
    return {
        "rollouts": rollouts | {k: i[k] for k in names if k in i},
        "policy": {"logp": i.get("logp", i["mask"])} | policy,
    }


@pytest.mark.parametrize(("i", "e"), cases("gae"))
def test_gae(i, e):
    b = Batch(case_of(i, values=i["values"]))
    A = [values.gae(y.take("token_rewards"), y.take("values"), i["gamma"], i["lambda"]) for y in b]
    same(b.spread(A), e["advantages"])
    same(b.spread(mixed_policy.whitened(A)), e["whitened"])
    same(
        b.spread([[a + v for a, v in zip(r, y.take("values"), strict=True)] for r, y in zip(A, b, strict=True)]),
        e["returns"],
    )


@pytest.mark.parametrize(("i", "e"), cases("ppo"))
def test_ppo(i, e):
    numbers = {n: i[n] for n in ("gamma", "kl_coef", "value_clip", "vf_coef", "entropy_coef", "whiten")}
    numbers |= {"lam": i["lambda"], "low": i["clip"], "high": i["clip"]}
    loss, c, A, _, slopes = values.ppo(case_of(i, values=i["values"], entropy=i["entropy"]), **numbers)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    same(A, e["whitened"] if i["whiten"] else e["advantages"])
    same(slopes, {"values": e["value_gradient"], "entropy": e["entropy_gradient"]})


@pytest.mark.parametrize(("i", "e"), cases("value_loss"))
def test_value_loss(i, e):
    b = Batch(case_of(i | {"returns": None}, values=i["values"], returns=i["returns"]))
    V = [[Value(x) for x in y.take("values")] for y in b]
    rows = zip(V, b, strict=True)
    E = [[values.value_loss(*t, i["value_clip"]) for t in zip(v, y.take("values_old"), y.take("returns"), strict=True)]
         for v, y in rows]  # fmt: skip
    loss = B.token_mean(b, E)
    same(loss, e["loss"])
    same(b.spread([gradients(loss, v) for v in V]), e["value_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("vapo_gae"))
def test_vapo_gae(i, e):
    b = Batch(case_of(i, values=i["values"]))
    lams = [values.adaptive_lambda(y.n, i["alpha"]) for y in b]
    same(lams, e["policy_lambda"])
    pairs = [(y.take("token_rewards"), y.take("values")) for y in b]
    same(
        b.spread([values.gae(r, v, i["gamma"], lam) for (r, v), lam in zip(pairs, lams, strict=True)]), e["advantages"]
    )
    critic = [values.gae(r, v, i["gamma"], i["critic_lambda"]) for r, v in pairs]
    same(
        b.spread([[a + x for a, x in zip(A, v, strict=True)] for A, (_, v) in zip(critic, pairs, strict=True)]),
        e["returns"],
    )


@pytest.mark.parametrize(("i", "e"), cases("vapo_nll"))
def test_vapo_nll(i, e):
    zeros = [[0.0] * len(row) for row in i["mask"]]
    case = case_of(
        i | {"values_old": zeros, "token_rewards": zeros, "scores": [float(c) for c in i["correct"]]}, values=zeros
    )
    loss, c, _, _, _ = values.vapo(case, nll=i["weight"], vf_coef=0.0)
    same(loss, e["loss"])
    same(c, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("spo_tracker"))
def test_spo(i, e):
    ema = i["variant"] == "ema"
    if ema:
        trackers = {k: tuple(v) for k, v in i["trackers"].items()}
    else:
        smoothed = i["variant"] != "unsmoothed"
        offline = i["offline"].items()
        trackers = {k: outcomes.beta_start(v["successes"], v["samples"], i["rho_min"], smoothed) for k, v in offline}
    same({k: list(v) for k, v in trackers.items()}, e["trackers_start"])

    def rho(row):
        if i["forgetting"] == "constant":
            return i["rho"]
        return outcomes.forgetting(row["drift"], i["half_life"], i["rho_min"], i["rho_max"])

    for step, want in zip(i["steps"], e["steps"], strict=True):
        got = outcomes.spo_step(trackers, step, rho, ema)
        weights = {} if ema else {k: outcomes.sampling_weight(*v) for k, v in trackers.items()}
        same(got | {"sampling_weights_before": weights}, want)
        trackers = got["trackers_after"]


@pytest.mark.parametrize(("i", "e"), cases("riskpo"))
def test_riskpo(i, e):
    z = [math.fsum(row) for row in i["scores"]]
    same(z, e["bundle_scores"])
    if i["variant"] == "paper":
        A = [outcomes.risk_paper(x, *i["quantiles"], i["omega"]) for x in z]
    else:
        numbers = (i["alpha"], i["beta"], i["mix"], i["natural_baseline"])
        A = [outcomes.risk_code(x, *i["quantiles"], *numbers) for x in z]
        if i["divide_by_std"]:
            A = [a / (math.sqrt(B.variance(z)) + 1e-6) for a in A]
    same(A, e["advantages"])
    same(outcomes.sum_mean_credit(A, i["scores"]), e["sum_mean_credit"])


@pytest.mark.parametrize(("i", "e"), cases("riskpo_tracker"))
def test_riskpo_tracker(i, e):
    q = i["quantiles"]
    for scores, want in zip(i["batches"], e["quantiles_after"], strict=True):
        q = outcomes.quantile_step(q, i["levels"], scores, i["lr"])
        same(q, want)


def in_groups(group, items, rule):
    """rule(items of a group) -> list, put back in the rows' order."""
    out = [None] * len(group)
    for g in dict.fromkeys(group):
        members = [k for k, x in enumerate(group) if x == g]
        for k, v in zip(members, rule([items[k] for k in members]), strict=True):
            out[k] = v
    return out


@pytest.mark.parametrize(("i", "e"), cases("gapo"))
def test_gapo(i, e):
    normalised = i["variant"] == "normalised"
    rewards = in_groups(i["group"], i["outputs"], lambda o: outcomes.gapo_rewards(i["valid_set"], o, normalised))
    same(rewards, e["rewards"])
    for name, ddof in (("population", 0), ("sample", 1)):
        rule = B.z_score(1e-4, ddof)
        A = in_groups(i["group"], rewards, lambda r, rule=rule: [rule(r, k) for k in range(len(r))])
        same(A, e[f"advantages_{name}"])


@pytest.mark.parametrize(("i", "e"), cases("madrl"))
def test_madrl(i, e):
    same(
        outcomes.madrl_rewards(i["target"], i["categories"], i["variant"], i["floor"], i["invalid_reward"]),
        e["rewards"],
    )


@pytest.mark.parametrize(("i", "e"), cases("ttrl"))
def test_ttrl(i, e):
    for k, answers in enumerate(i["answers"]):
        label, votes = outcomes.majority(answers, i["voters"])
        assert (label, votes) == (e["labels"][k], e["votes"][k])
        assert [float(a is not None and a == label) for a in answers[: i["trained"]]] == e["rewards"][k]


@pytest.mark.parametrize(("i", "e"), cases("rlcr"))
def test_rlcr(i, e):
    rows = zip(i["correct"], i["confidence"], i["format_reward"], strict=True)
    same([outcomes.rlcr_reward(*row) for row in rows], e["rewards"])


@pytest.mark.parametrize(("i", "e"), cases("gprl"))
def test_gprl(i, e):
    same(outcomes.gprl(i["axis_rewards"], i["axis_weights"], i["ddof"], i["eps"]), e)


@pytest.mark.parametrize(("i", "e"), cases("repo_swap"))
def test_repo(i, e):
    for rewards, rephrased, want in zip(i["rewards"], i["rephrased_reward"], e["groups"], strict=True):
        got = outcomes.repo_swap(rewards, rephrased, i["delta"], i["rho"])
        rule = B.z_score(ddof=0)
        same(got | {"advantages_population": [rule(got["rewards"], k) for k in range(len(rewards))]}, want)


@pytest.mark.parametrize(("i", "e"), cases("pass_at_k"))
def test_pass_at_k(i, e):
    rows = zip(i["samples"], i["correct"], strict=True)
    same([[outcomes.pass_at_k(n, c, k) for k in i["k"]] for n, c in rows], e["pass_at_k"])


@pytest.mark.parametrize(("i", "e"), cases("dpo"))
def test_dpo(i, e):
    same(pairwise.dpo(i, i["beta"], i["variant"], i["label_smoothing"]), e)


@pytest.mark.parametrize(("i", "e"), cases("simpo"))
def test_simpo(i, e):
    same(pairwise.simpo(i, i["beta"], i.get("gamma"), i.get("gamma_beta_ratio")), e)


@pytest.mark.parametrize(("i", "e"), cases("reward_model"))
def test_reward_model(i, e):
    loss, chosen, rejected = pairwise.reward_model(i["chosen"], i["rejected"], i["margin"], i["centering"], i["prompt"])
    same({"loss": loss, "chosen_gradient": chosen, "rejected_gradient": rejected}, e)


def test_turn_level_density_ratio():
    (entry,) = (e for e in json.loads((GOLDEN / "formulas.json").read_text())["entries"] if e["name"] == "tlm_dre")
    i = entry["inputs"]
    got = pairwise.mdre(i["chosen"], i["chosen_ref"], i["rejected"], i["rejected_ref"], i["low"], i["high"], i["pivot"])
    flat = pairwise.mdre(i["chosen"], i["chosen_ref"], i["rejected"], i["rejected_ref"], low=1.0)
    want = {n: v for n, v in entry["expect"].items() if n in got}
    same(got, want, abs_tol=1e-6)
    same(flat["loss"], entry["expect"]["loss_om_1"], abs_tol=1e-6)
