"""The references against the golden numbers: weights, gates and losses of the wider family."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from reference import batch as B
from reference import group_coupled, grpo_family, mismatch, mixed_policy, rejection, trust_region, variants
from reference.batch import Batch
from reference.scalar import Value, clamp, gradients, stop

GOLDEN = Path(__file__).parent.parent / "golden"
ROLLOUT = ("mask", "group", "logp_old", "logp_sampler", "logp_ref", "logp_prox", "logp_behaviour", "advantages")


def cases(name):
    return [
        pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in json.loads((GOLDEN / f"{name}.json").read_text())
    ]


def case_of(i: dict, **more) -> dict:
    """Golden inputs as a case; advantages stand as given, rewards and groups default to 0."""
    rows = len(i["mask"])
    rollouts = {"group": [0] * rows, "rewards": [0.0] * rows} | {n: i[n] for n in ROLLOUT if n in i}
    rollouts["rewards"] = i.get("rewards", i.get("scores", rollouts["rewards"]))
    policy = {n: i[n] for n in ("logp", "entropy", "router_logp") if n in i}
    policy.setdefault("logp", i.get("logp_old"))
    return {"rollouts": rollouts | more, "policy": policy}


def same(got, want, rel=1e-9):
    """Numbers and nested lists agree to 1e-9 relative, 1e-12 absolute."""
    if isinstance(want, list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w, rel)
    else:
        assert math.isclose(stop(got), want, rel_tol=rel, abs_tol=1e-12), (got, want)


def rows(batch, values):
    return batch.spread(values)


@pytest.mark.parametrize(("i", "e"), cases("rspo"))
def test_rspo(i, e):
    def active(field):
        """The scores of the experts that were active under the old router."""
        return [[[[layer[k] for k in top(old)] for layer, old in zip(*token, strict=True)]
                 for token in zip(*row, strict=True)]
                for row in zip(i[field], i["router_logp_old"], strict=True)]  # fmt: skip

    def top(old):
        return sorted(range(len(old)), key=lambda k: -old[k])[: i["active_experts"]]

    case = case_of(i, router_logp_old=active("router_logp_old"))
    case["policy"]["router_logp"] = active("router_logp")
    numbers = {"floor": i["gamma_min"], "layers": i["layer_agg"]}
    if i["variant"] == "sequence_post_clip":
        loss, c, _, _ = trust_region.rspo(case, bound=i["log_clip"], **numbers)
    else:
        loss, c, _, _ = getattr(trust_region, f"rspo_{i['variant']}")(case, i["low"], i["high"], **numbers)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    batch = Batch(case)
    same(rows(batch, [trust_region.gammas(y, i["gamma_min"], i["layer_agg"]) for y in batch]), e["gamma"])
    same(rows(batch, [trust_region.gammas(y, 0.0, i["layer_agg"]) for y in batch]), e["gamma_raw"])


@pytest.mark.parametrize(("i", "e"), cases("luffy"))
def test_luffy(i, e):
    case = case_of(i, origin=[2 if off else 0 for off in i["off_policy"]])
    behaviour = "logp_behaviour" if i["variant"] == "behaviour_known" else None
    batch = Batch(case)
    A = batch.by_group(batch.rewards, B.centred)
    same(A, e["advantages"])
    J = [mixed_policy.luffy_objective(y, a, i["gamma"], behaviour) for y, a in zip(batch, A, strict=True)]
    same(rows(batch, J), e["token_surrogate"])
    slopes = [gradients(sum(row), y.logp) for row, y in zip(J, batch, strict=True)]
    same(rows(batch, slopes), e["token_coefficient"])
    for average in ("sum_over_width", "sum_over_rows_and_width", "token_mean"):
        loss, c, _, _ = mixed_policy.luffy(case, i["gamma"], average, behaviour)
        same(loss, e[average]["loss"])
        same(c, e[average]["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("stare"))
def test_stare(i, e):
    numbers = {n: i[n] for n in ("fraction", "W", "M", "target_entropy", "low", "high")}
    variant = "C2" if i["variant"] == "C2" else "O1"
    loss, c, _, w = group_coupled.stare(case_of(i), variant=variant, dual=i["dual_clip"], **numbers)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    same(w, e["weights"])
    adapted = group_coupled.stare_adapted(i["W"], i["M"], e["mean_entropy"], i["target_entropy"], i["adapt"])
    same(list(adapted), [e["adapted_W"], e["adapted_M"]])


@pytest.mark.parametrize(("i", "e"), cases("reco"))
def test_reco(i, e):
    batch = Batch(case_of(i))
    v = [[group_coupled.variance_ratio(lp.data, o) for lp, o in zip(y.logp, y.old, strict=True)] for y in batch]
    same(rows(batch, v), e["v"])
    same(rows(batch, [y.ratios() for y in batch]), e["importance_ratio"])


@pytest.mark.parametrize(("i", "e"), cases("sis"))
def test_sis(i, e):
    got = group_coupled.sis_position(i["old_probs"], i["new_probs"], i["top_k"], i["low"], i["high"])
    for name, want in e.items():
        same(got[name], want)


@pytest.mark.parametrize(("i", "e"), cases("gmc_grpo"))
def test_gmc_grpo(i, e):
    _, _, _, w = group_coupled.gmc_grpo(case_of(i), cap=i["cap"])
    batch = Batch(case_of(i))
    same([group_coupled.trajectory_ratio(y) for y in batch], e["ratios"])
    same(w, rows(batch, e["weights"]))


@pytest.mark.parametrize(("i", "e"), cases("zcpo"))
def test_zcpo(i, e):
    mask = [[0, 1]] * len(i["group"])
    case = {"rollouts": {"mask": mask, "group": i["group"], "rewards": i["rewards"]}, "policy": {}}
    case["policy"] = {"logp": [[0.0, -1.0] for _ in mask], "kl_ref": [[9.0, d] for d in i["divergence"]]}
    _, _, C, _ = group_coupled.zcpo(case, beta=i["beta"])
    same([row[1] for row in C], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("opsm"))
def test_opsm(i, e):
    batch = Batch(case_of(i))
    same([rejection.drift(y) for y in batch], e["mean_log_ratio"])
    for over in ("all", "kept"):
        loss, c, _, w = rejection.opsm(case_of(i), i["delta"], i["clip"], i["clip"], over)
        same(loss, e[f"{over}_tokens_in_denominator"]["loss"])
        same(c, e[f"{over}_tokens_in_denominator"]["coefficients"])
        same(w, rows(batch, [float(k) for k in e["keep"]]))


@pytest.mark.parametrize(("i", "e"), cases("missing_old_logits"))
def test_missing_old_logits(i, e):
    case = case_of(i)
    loss, c, _, w = mixed_policy.missing_old_logits(case, i["clip"], i["clip"])
    same(loss, e["loss"])
    same(c, e["coefficients"])
    same(w, e["engine_factor"])
    batch = Batch(case)
    same(rows(batch, [y.ratios("prox") for y in batch]), e["policy_factor"])
    same(rows(batch, [y.ratios("sampler") for y in batch]), e["full_ratio"])
    same(mixed_policy.ewma(i["weights"], i["decay"]), e["ewma_weights"])
    same(list(mixed_policy.interpolated_bounds(i["clip"], i["interpolation"])), e["equivalent_full_ratio_bounds"])
    full = [[stop(r) ** (1 - i["interpolation"]) for r in y.ratios("sampler")] for y in batch]
    same(rows(batch, full), e["interpolated_ratio"])


@pytest.mark.parametrize(("i", "e"), cases("ggpo"))
def test_ggpo(i, e):
    rollouts = {"mask": [[0, 1]] * 4, "group": [0] * len(i["rewards"]), "rewards": i["rewards"]}
    rollouts["mask"] = [[0, 1] for _ in i["rewards"]]
    rollouts["logp_ref"] = [[0.0, x] for x in i["sequence_logp_ref"]]
    case = {"rollouts": rollouts, "policy": {"logp": [[0.0, x] for x in i["sequence_logp"]]}}
    loss, c, _, _ = group_coupled.ggpo(case, i["beta"])
    same(loss, e["loss"])
    same([row[1] for row in c], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("conspo"))
def test_conspo(i, e):
    loss, c, _, _ = group_coupled.conspo(case_of(i), i["tau"], i["margin"], i["positive"])
    same(loss, e["loss"])
    same(c, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("minirl"))
def test_mini_rl(i, e):
    cap = math.inf if i["cap"] is None else i["cap"]
    loss, c, A, gates = trust_region.mini_rl(case_of(i), i["low"], i["high"], cap)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    same(gates, e["gates"])
    batch = Batch(case_of(i))
    same(A, rows(batch, e["advantages"]))
    same(rows(batch, [[min(stop(x), cap) for x in y.ratios("sampler")] for y in batch]), e["weights"])


@pytest.mark.parametrize(("i", "e"), cases("dhpo_entropy"))
def test_dhpo_entropy(i, e):
    clip = {
        "token_low": i["token_clip"],
        "token_high": i["token_clip"],
        "sequence_low": i["low"],
        "sequence_high": i["high"],
    }
    plain = i["variant"] == "plain_sequence_ratio"
    loss, c, _, _ = grpo_family.dhpo(case_of(i), weight="entropy", plain=plain, **clip)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    batch = Batch(case_of(i))
    same(rows(batch, [grpo_family.entropy_mix(y.take("entropy")) for y in batch]), e["weights"])


@pytest.mark.parametrize(("i", "e"), cases("geometric_rejection"))
def test_geometric_rejection(i, e):
    batch = Batch(case_of(i))
    same([rejection.geometric_ratio(y) for y in batch], e["geometric_ratio"])
    w = [rejection.geometric_weights(y, i["lower"], i["upper"], i["veto"]) for y in batch]
    same(rows(batch, w), e["weights"])
    assert [int(any(row)) for row in w] == e["keep"]


@pytest.mark.parametrize(("i", "e"), cases("rejection"))
def test_rejection(i, e):
    batch = Batch(case_of(i))
    for rule, want in zip(i["rules"], e["statistics"], strict=True):
        values = [rejection.statistic(y, rule["statistic"]) for y in batch]
        same(rows(batch, values) if rule["statistic"].startswith("token") else values, want)
    same(rows(batch, [rejection.keep(y, i["rules"]) for y in batch]), [[float(k) for k in row] for row in e["keep"]])


@pytest.mark.parametrize(("i", "e"), cases("graft"))
def test_graft(i, e):
    numbers = (i["receiver_mean_logp"], i["source_mean_logp"], i["threshold"], i["low"], i["high"])
    loss, c, _, w = mixed_policy.graft(case_of(i), *numbers)
    same(loss, e["loss"])
    same(c, e["coefficients"])
    same(w, rows(Batch(case_of(i)), e["weights"]))


@pytest.mark.parametrize(("i", "e"), cases("minpro_weights"))
def test_minpro(i, e):
    batch = Batch(case_of(i))
    R = [[stop(r) for r in y.ratios()] for y in batch]
    U = [trust_region.prefix_min(r) for r in R]
    same(rows(batch, U), e["prefix_min"])
    same(rows(batch, [trust_region.prefix_min(r, inclusive=True) for r in R]), e["inclusive_min"])
    for suffix, limit in (("", math.inf), ("_capped", 1.0)):
        w = [[min(u, limit) * x for u, x in zip(us, r, strict=True)] for us, r in zip(U, R, strict=True)]
        same(rows(batch, w), e[f"weights{suffix}"])
        same(rows(batch, [[clamp(x, 1 - i["low"], 1 + i["high"]) for x in row] for row in w]), e[f"clipped{suffix}"])


@pytest.mark.parametrize(("i", "e"), cases("m2po_released"))
def test_m2po_released(i, e):
    squares = [x * x for a, x in zip(i["advantages"], i["log_ratio"], strict=True) if trust_region.outward(a, x)]
    low, high, after = trust_region.m2po_code_range(squares, i["budget"])
    assert len(squares) == e["outward"]
    same([low, high], [e["low"], e["high"]])
    if "mean_after" in e:
        same(after, e["mean_after"])


@pytest.mark.parametrize(("i", "e"), cases("m2po_areal"))
def test_m2po_areal(i, e):
    squares = [[x * x for x in i["log_ratio"]]]
    keep = variants.moment_mask(squares, lambda left: B.mean(left) >= i["tau"] and left[0] < left[-1])
    assert keep == [[float(k) for k in e["keep"]]]


@pytest.mark.parametrize(("i", "e"), cases("dppo_topk"))
def test_dppo_topk(i, e):
    mu, pi = i["sampler_probs"], i["policy_probs"]
    top = set(sorted(range(len(mu)), key=lambda v: -mu[v])[: i["top_k"]]) | {i["token"]}
    assert sorted(top) == sorted(e["buckets"])
    for kind in ("tv", "kl"):
        for name, ids in (("topk", top), ("full", range(len(mu)))):
            got = trust_region.topk_divergence({v: mu[v] for v in ids}, {v: pi[v] for v in ids}, kind)
            same(got, e[f"{name}_{kind}"])
    same(trust_region.binary_tv(mu[i["token"]], pi[i["token"]]), e["binary_tv"])
    same(trust_region.binary_kl(mu[i["token"]], pi[i["token"]]), e["binary_kl"])


@pytest.mark.parametrize(("i", "e"), cases("stapo_scope"))
def test_stapo_scope(i, e):
    numbers = (i["tau_p"], i["quantile"], i["variant"])
    candidates, threshold, keep = trust_region.spurious(i["probs"], i["entropy"], i["advantages"], *numbers)
    assert [int(c) for c in candidates] == e["candidates"]
    same(threshold, e["threshold"])
    assert [int(k) for k in keep] == e["keep"]


@pytest.mark.parametrize(("i", "e"), cases("reinforce_pp_kl"))
def test_reinforce_pp_kl(i, e):
    batch = Batch(case_of(i))
    if i["variant"] == "kl_in_reward":
        raw = [mixed_policy.return_to_go(y, y.reward, i["kl_coef"]) for y in batch]
        loss, c, A, _ = mixed_policy.reinforce_pp_kl(case_of(i), i["kl_coef"], i["clip"], i["clip"])
    else:
        raw = batch.by_group(batch.rewards, B.centred)
        numbers = {"beta": i["kl_coef"], "estimator": i["variant"][-2:], "low": i["clip"], "high": i["clip"]}
        loss, c, A, _ = mismatch.reinforce_pp_baseline(case_of(i), **numbers)
    same(rows(batch, raw), e["advantages_raw"])
    same(A, e["advantages"])
    same(loss, e["loss"])
    same(c, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("remax"))
def test_remax(i, e):
    loss, c, A, _ = mixed_policy.remax(case_of(i, baseline=i["greedy_scores"]), i["kl_coef"])
    same(A, e["advantages"])
    same(loss, e["loss"])
    same(c, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("group_advantage"))
def test_group_advantage(i, e):
    n = len(i["group"])
    case = {"rollouts": {"mask": [[0, 1]] * n, "group": i["group"], "rewards": i["rewards"]}}
    case["policy"] = {"logp": [[0.0, -1.0]] * n}
    batch = Batch(case)
    same(batch.by_group(batch.rewards, B.z_score()), e["sample_std"])
    same(batch.by_group(batch.rewards, B.z_score(1e-4)), e["sample_std_eps_1e-4"])
    same(batch.by_group(batch.rewards, B.z_score(ddof=0)), e["population_std"])
    same(batch.by_group(batch.rewards, B.centred), e["centred"])
    same(batch.by_group(batch.rewards, B.leave_one_out), e["leave_one_out"])


@pytest.mark.parametrize(("i", "e"), cases("aggregation"))
def test_aggregation(i, e):
    case = {"rollouts": {"mask": i["mask"], "group": i["group"], "rewards": [0.0] * len(i["mask"])}}
    case["policy"] = {"logp": i["values"]}
    averages = {"seq_mean": B.sequence_mean, "token_mean": B.token_mean, "seq_sum": B.sequence_sum}
    averages["const"] = lambda batch, J: B.sequence_sum(batch, J) / i["length"]
    for name, average in averages.items():
        batch = Batch(case)
        value = average(batch, [list(y.logp) for y in batch])
        got, slopes, _, _ = batch.result(value, [0.0] * batch.N)
        same(got, e[name]["value"])
        same(slopes, e[name]["weights"])


@pytest.mark.parametrize(("i", "e"), cases("overlong"))
def test_overlong(i, e):
    if i["variant"] == "paper":
        same([grpo_family.overlong_penalty(n, i["max_length"], i["buffer"]) for n in i["lengths"]], e["penalties"])


def test_values_are_only_read_where_they_are_used():
    assert gradients(Value(1.0) * 2.0, [Value(3.0)]) == [0.0]
