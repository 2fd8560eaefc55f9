"""Corrections, trust masks and batch weights against the golden numbers."""

from __future__ import annotations

import pytest
import torch

import kenpo
from algorithms.golden import cases, evaluated, padded, same, tensor, view
from kenpo.ops import divergences, proximal, ratios, trust
from kenpo.stages import (
    Compatibility,
    CorrectionMoment,
    DivergenceMask,
    GroupMass,
    MaskedIS,
    MomentClip,
    OffPolicySequences,
    RatioGate,
    Rejection,
    SequenceKLMask,
    SpuriousTokens,
    Surprisal,
    TruncatedIS,
)

pytestmark = pytest.mark.filterwarnings("ignore::kenpo.errors.NoDivergenceWarning")


def row(values) -> list:
    """One response whose tokens are the values."""
    return [list(values)]


@pytest.mark.parametrize(("i", "e"), cases("dppo_topk"))
def test_dppo_topk(i, e):
    mu, pi, token = tensor(i["sampler_probs"]).log(), tensor(i["policy_probs"]).log(), i["token"]
    top = mu.topk(i["top_k"]).indices
    fields = {
        "tokens": torch.tensor([[0, token]]),
        "topk_ids": torch.stack([torch.zeros_like(top), top]).unsqueeze(0),
        "topk_logp_sampler": torch.stack([torch.zeros(i["top_k"]).double(), mu[top]]).unsqueeze(0),
        "topk_logp": torch.stack([torch.zeros(i["top_k"]).double(), pi[top]]).unsqueeze(0),
    }
    inputs = {"mask": [[1]], "logp_sampler": [[float(mu[token])]], "logp": [[float(pi[token])]]}
    for buckets, kind in (("top_k", "tv"), ("top_k", "kl"), ("binary", "tv"), ("binary", "kl")):
        stage = DivergenceMask(kind=kind, buckets=buckets)
        got = stage._divergence(view(stage, inputs, **fields))
        same(got, [[e[f"{'topk' if buckets == 'top_k' else 'binary'}_{kind}"]]])
    everything = torch.ones(len(mu), dtype=torch.bool)
    for kind in ("tv", "kl"):
        assert float(divergences.bucket_divergence(mu, pi, everything, kind)) == pytest.approx(e[f"full_{kind}"], 1e-9)


@pytest.mark.parametrize(("i", "e"), cases("trm_gate"))
def test_trm_exact_gate(i, e):
    mu, pi = (tensor(i[n]).log_softmax(-1) for n in ("logits_sampler", "logits"))
    kl = (mu.exp() * (mu - pi)).sum(-1)
    mask = tensor(i["mask"])
    same(kl * mask, e["kl"])
    kl = torch.cat([torch.zeros(len(kl), 1).double(), kl], 1)
    given = {"mask": i["mask"]}
    for limits, name in (
        ({"max": i["delta_max"], "mean": None}, "keep_max"),
        ({"max": None, "mean": i["delta_avg"]}, "keep_avg"),
        ({"max": i["delta_max"], "mean": i["delta_avg"]}, "keep_both"),
    ):
        stage = SequenceKLMask(estimator="exact", **limits)
        got = stage(view(stage, given, kl_sampler=kl))
        assert torch.equal(got.any(-1), torch.tensor(e[name]).bool())
        assert torch.equal(got[:, 1:], mask.bool() & torch.tensor(e[name]).bool().unsqueeze(-1))


@pytest.mark.parametrize(("i", "e"), cases("m2po_released"))
def test_m2po_released(i, e):
    x = tensor(i["log_ratio"])
    outward = trust.outward(x, tensor(i["advantages"]))
    assert int(outward.sum()) == e["outward"]
    inputs = {"mask": [[1]] * len(x), "logp": [[v] for v in i["log_ratio"]], "logp_sampler": [[0.0]] * len(x)}
    stage = MomentClip(budget=i["budget"])
    low, high = stage.range(view(stage, inputs | {"advantages": i["advantages"]}))
    assert (low, high) == (pytest.approx(e["low"], 1e-9), pytest.approx(e["high"], 1e-9))
    if "mean_after" in e:
        cap = trust.capped_moment((x * x)[outward], i["budget"])
        assert float((x * x)[outward].clamp(max=float(cap)).mean()) == pytest.approx(e["mean_after"], 1e-9)


@pytest.mark.parametrize(("i", "e"), cases("m2po_areal"))
def test_m2po_areal(i, e):
    x = i["log_ratio"]
    inputs = {"mask": row([1] * len(x)), "logp_old": row(x), "logp_sampler": row([0.0] * len(x))}
    stage = CorrectionMoment(budget=i["tau"])
    same(stage(view(stage, inputs))[:, 1:], row(e["keep"]))


@pytest.mark.parametrize(("i", "e"), cases("stapo_scope"))
def test_stapo_scope(i, e):
    n = len(i["probs"])
    logp = tensor(i["probs"]).log().unsqueeze(-1).tolist()
    inputs = {"mask": [[1]] * n, "logp": logp, "entropy": [[h] for h in i["entropy"]], "advantages": i["advantages"]}
    stage = SpuriousTokens(probability=i["tau_p"], quantile=i["quantile"], scope=i["variant"])
    keep = stage(view(stage, inputs))[:, 1]
    same(keep, e["keep"])
    assert int(keep.sum()) == e["denominator"]
    pool = [h for h, c in zip(i["entropy"], e["candidates"], strict=True) if c or i["variant"] == "batch"]
    assert float(trust.quantile(tensor(pool), i["quantile"])) == pytest.approx(e["threshold"], 1e-9)


@pytest.mark.parametrize(("i", "e"), cases("opsm"))
def test_opsm(i, e):
    settings = {
        "weights.off_policy_sequences.delta": i["delta"],
        "surrogate.low": i["clip"],
        "surrogate.high": i["clip"],
    }
    for over in ("all", "kept"):
        result = evaluated(kenpo.get("opsm").with_settings(settings | {"aggregate.over": over}), i)
        want = e[f"{over}_tokens_in_denominator"]
        assert float(result.loss.detach()) == pytest.approx(want["loss"], 1e-9)
        same(result.coefficients, want["coefficients"])
    stage = OffPolicySequences(delta=i["delta"])
    assert torch.equal(stage(view(stage, i)).any(-1), torch.tensor(e["keep"]).bool())


@pytest.mark.parametrize(("i", "e"), cases("rejection"))
def test_rejection(i, e):
    stage = Rejection(rules=i["rules"])  # as settings give them
    ctx = view(stage, i)
    same(stage(ctx), e["keep"])
    for rule, want in zip(stage.rules, e["statistics"], strict=True):
        got = rule.values(ctx.log_correction(), ctx.mask)
        same(got if rule.per_token else got.squeeze(-1), want)


@pytest.mark.parametrize(("i", "e"), cases("geometric_rejection"))
def test_geometric_rejection(i, e):
    stage = MaskedIS(floor=i["lower"], cap=i["upper"], level="geometric", veto=i["veto"])
    ctx = view(stage, i)
    weights = stage(ctx)
    same(weights, e["weights"])
    same(ratios.sequence_log_mean(ctx.log_correction(), ctx.mask).exp().squeeze(-1), e["geometric_ratio"])
    assert torch.equal(weights.any(-1), torch.tensor(e["keep"]).bool())


@pytest.mark.parametrize(("i", "e"), cases("stare"))
def test_stare(i, e):
    damp = i["M"] if i["variant"] == "C2" else None
    stage = Surprisal(fraction=i["fraction"], boost=i["W"], damp=damp, target_entropy=i["target_entropy"])
    clip = kenpo.stages.Clip(i["low"], i["high"])
    if i["dual_clip"] is not None:
        clip = kenpo.stages.DualClip(i["low"], i["high"], dual=i["dual_clip"])
    result = evaluated(kenpo.get("stare").but(weights=(stage,), surrogate=clip), i)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], 1e-9)
    same(result.coefficients, e["coefficients"])
    same(result.weights, e["weights"])
    adapted = trust.adapted_boost(i["W"], i["M"], e["mean_entropy"], i["target_entropy"], i["adapt"])
    assert adapted == (pytest.approx(e["adapted_W"]), pytest.approx(e["adapted_M"]))


@pytest.mark.parametrize(("i", "e"), cases("gmc_grpo"))
def test_gmc_grpo(i, e):
    stage = GroupMass(cap=i["cap"])
    weights = stage(view(stage, i))
    mask = padded(i["mask"])
    same(weights, (tensor(e["weights"]).unsqueeze(-1) * mask)[:, 1:].tolist())


@pytest.mark.parametrize(("i", "e"), cases("missing_old_logits"))
def test_missing_old_logits(i, e):
    a = kenpo.get("missing_old_logits").with_settings({"surrogate.low": i["clip"], "surrogate.high": i["clip"]})
    inputs = {n: v for n, v in i.items() if n != "weights"}
    result = evaluated(a, inputs)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], 1e-9)
    same(result.coefficients, e["coefficients"])
    same(result.weights, e["engine_factor"])
    average = tensor(i["weights"][0])
    for new, want in zip(i["weights"][1:], e["ewma_weights"], strict=True):
        average = proximal.ewma(average, tensor(new), i["decay"])
        same(average, want)
    ctx = view(TruncatedIS(anchor="prox"), inputs)
    mixed = proximal.interpolated(ctx.logp, ctx.read("logp_sampler"), i["interpolation"])
    same((ctx.logp - mixed).exp() * ctx.mask, e["interpolated_ratio"])
    bounds = proximal.equivalent_bounds(i["clip"], i["clip"], i["interpolation"])
    assert list(bounds) == pytest.approx(e["equivalent_full_ratio_bounds"], 1e-9)


@pytest.mark.parametrize(("i", "e"), cases("graft"))
def test_graft(i, e):
    receiver, source = tensor(i["receiver_mean_logp"]), tensor(i["source_mean_logp"])
    same(trust.compatibility(receiver, source, i["threshold"]), e["weights"])
    mask, old = padded(i["mask"]).bool(), padded(i["logp_old"])
    mean = torch.where(mask, old, 0.0).sum(-1) / mask.sum(-1)  # the case states the means apart from the tokens
    settings = {"weights.compatibility.threshold": i["threshold"], "aggregate.over": "all"}
    settings |= {"surrogate.low": i["low"], "surrogate.high": i["high"]}
    result = evaluated(kenpo.get("graft").with_settings(settings), i, logp_source=mean - (receiver - source))
    assert float(result.loss.detach()) == pytest.approx(e["loss"], 1e-9)
    same(result.coefficients, e["coefficients"])


def test_graft_leaves_own_responses_alone():
    i = {"mask": [[1, 1], [1, 0]], "logp_old": [[-9.0, -9.0], [-1.0, 0.0]]}
    stage = Compatibility()
    weights = stage(view(stage, i, logp_source=tensor([float("nan"), -0.1])))
    same(weights, [[1.0, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize(("i", "e"), cases("minirl"))
def test_mini_rl(i, e):
    settings = {"surrogate.cap": i["cap"], "weights.ratio_gate.low": i["low"], "weights.ratio_gate.high": i["high"]}
    result = evaluated(kenpo.get("mini_rl").with_settings(settings), i)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], 1e-9)
    same(result.coefficients, e["coefficients"])
    same(result.weights, e["gates"])
    stage = RatioGate(i["low"], i["high"])
    same(result.advantages.abs().amax(-1), [abs(a) for a in e["advantages"]])
    assert stage.span == kenpo.Scope.TOKEN


@pytest.mark.parametrize(("i", "e"), cases("offpolicy_stats"))
def test_off_policy_statistics(i, e):
    old, sampler, mask = (padded(i[n]) for n in ("logp_old", "logp_sampler", "mask"))
    mask = mask.bool()
    rows, whole = divergences.off_policy_statistics(ratios.log_ratio(old, sampler, mask), mask)
    for k, want in enumerate(e["sequences"]):
        for name, value in want.items():
            assert float(rows[name][k]) == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for name, value in e["batch"].items():
        assert float(whole[name]) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


# -- numbers printed in the papers' and frameworks' own examples -----------------------------------------------------

TRAIN, ROLL = [-0.5, -2.0, -1.0, -3.0], [-0.6, -4.0, -0.9, -1.5]


@pytest.mark.parametrize(
    ("stage", "want"),
    [
        (TruncatedIS(cap=2.0), [1.105171, 2.0, 0.904837, 0.223130]),
        (TruncatedIS(cap=2.0, level="sequence"), [1.648721] * 4),
        (MaskedIS(floor=0.5, cap=5.0), [1.105171, 0.0, 0.904837, 0.0]),
        (MaskedIS(floor=0.5, cap=5.0, veto=0.3), [0.0] * 4),
        (MaskedIS(floor=0.5, cap=1.5, level="sequence"), [0.0] * 4),
        (MaskedIS(floor=1.1, cap=1.2, level="geometric"), [1.105171, 7.389056, 0.904837, 0.223130]),
    ],
)
def test_corrections(stage, want):
    ctx = view(stage, {"mask": row([1] * 4), "logp_old": row(TRAIN), "logp_sampler": row(ROLL)})
    assert torch.allclose(stage(ctx)[0, 1:], tensor(want), atol=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "forward", "reverse"),
    [
        (0.01, 0.05, 0.0247361, 0.0412911),
        (0.9, 0.6, 0.2262892, 0.3112387),
        (0.99, 0.12, 2.0443377, 3.6868308),
    ],
)
def test_binary_kl(p, q, forward, reverse):
    a, b = tensor([p]).log(), tensor([q]).log()
    assert float(divergences.binary_kl(a, b)) == pytest.approx(forward, abs=1e-7)
    assert float(divergences.binary_kl(b, a)) == pytest.approx(reverse, abs=1e-7)


def test_dppo_keeps_what_the_clip_would_drop():
    mu, pi = tensor([0.90, 0.50, 0.10, 0.001, 0.30, 0.02]), tensor([0.60, 0.75, 0.40, 0.010, 0.28, 0.001])
    for stage in (DivergenceMask("tv", 0.15), DivergenceMask("kl", 0.05)):
        for advantage, want in ((1.0, [1, 0, 0, 1, 1, 1]), (-1.0, [0, 1, 1, 1, 1, 1])):
            inputs = {"mask": row([1] * 6), "logp": row(pi.log().tolist()), "logp_sampler": row(mu.log().tolist())}
            got = stage(view(stage, inputs | {"advantages": [advantage]}))
            same(got[:, 1:], row(want))


def test_m2po_of_the_paper():
    x = [0.5, 0.1, -0.9, -0.3, 0.2, -0.05, 0.02, -0.25]
    a = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0]
    inputs = {"mask": [[1]] * 8, "logp": [[v - 1] for v in x], "logp_sampler": [[-1.0]] * 8, "advantages": a}
    result = evaluated(kenpo.get("m2po"), inputs)
    assert result.weights[:, 1].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert float(result.loss.detach()) == pytest.approx(0.145039, abs=1e-6)
    code = MomentClip()
    assert code.range(view(code, inputs)) == (pytest.approx(0.221199, abs=1e-6), pytest.approx(0.284025, abs=1e-6))
    areal = CorrectionMoment()
    inputs = {"mask": row([1] * 8), "logp_old": row(x), "logp_sampler": row([0.0] * 8)}
    same(areal(view(areal, inputs))[:, 1:], row([0, 1, 0, 1, 1, 1, 1, 1]))


def test_mini_rl_with_the_old_weight():
    lp, old, mu = ([-0.5, -1, -2, -0.2, -3], [-0.6, -1.3, -1.7, -0.2, -3], [-0.7, -1.1, -1.9, -2.2, -2.5])
    inputs = {"mask": row([1] * 5), "logp": row(lp), "logp_old": row(old), "logp_sampler": row(mu)}
    for name, advantage, want in (
        ("mini_rl", 0.75, [-0.916052, 0, -0.678628, -3.75, -0.454898]),
        ("mini_rl", -0.25, [0.305351, 0.276293, 0, 1.25, 0.151633]),
        ("mini_rl-old", 0.75, [-0.828878, 0, -0.916052, -3.75, -0.454898]),
    ):
        got = evaluated(kenpo.get(name), inputs | {"advantages": [advantage]}).coefficients[0, 1:]
        assert torch.allclose(got, tensor(want), atol=1e-6)
