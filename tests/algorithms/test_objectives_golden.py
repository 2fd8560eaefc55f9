"""Ratios, surrogates, advantages and penalties against the golden numbers and the numbers printed with the formulas."""

from __future__ import annotations

import json
import math

import pytest
import torch

import kenpo
from algorithms.golden import GOLDEN, batch, cases, evaluated, same, tensor, view
from kenpo import order, stages
from kenpo.ops import contrast, groups, ratios, sampling, surrogates
from kenpo.stages import BranchClip, InverseLikelihood, RouterShift, SequenceRatio, VarianceRatio

DOC = json.loads((GOLDEN / "formulas.json").read_text())
CATALOGUED = [e for e in DOC["entries"] if e.get("algorithm") in kenpo.names() and "loss" in e["expect"]]
#: What the notes say in words, by the entry's name.
BANDS = {"sequence_low": 0.1, "sequence_high": 0.15}
IN_WORDS = {
    "dapo_group_token": kenpo.get("dapo-paper-denominator"),
    "grpo_dual_clip": kenpo.get("grpo").but(surrogate=stages.DualClip(dual=1.1), regularizers=()),
    "gmpo_asymmetric_literal": kenpo.get("gmpo-literal").with_settings({"ratio.bound.high": 0.5}),
    "dhpo_half_plain": kenpo.get("dhpo-plain").with_settings({f"surrogate.{k}": v for k, v in BANDS.items()}),
    "dhpo_entropy": kenpo.get("dhpo-entropy").with_settings({f"surrogate.{k}": v for k, v in BANDS.items()}),
}


@pytest.mark.parametrize("entry", CATALOGUED, ids=lambda e: e["name"])
def test_printed_batches(entry):
    """Every printed loss, sum of |d loss/d logp| and gradient row."""
    name = entry["algorithm"]
    a = IN_WORDS[entry["name"]] if "variant" in entry else kenpo.get(name).with_settings(entry["settings"])
    case = DOC["batches"][entry["batch"]]
    rollouts = kenpo.Rollouts(**{n: tensor(v) if n not in ("mask", "group") else torch.tensor(v)
                                 for n, v in case["rollouts"].items()})  # fmt: skip
    policy = kenpo.Policy(**{n: tensor(v) for n, v in case["policy"].items()})
    result, want = kenpo.evaluate(a, rollouts, policy), entry["expect"]
    assert float(result.loss.detach()) == pytest.approx(want["loss"], abs=entry["tolerance"] + 1e-12)
    if "absolute_gradient_sum" in want:
        total = float(result.coefficients.abs().sum())
        assert total == pytest.approx(want["absolute_gradient_sum"], abs=entry["gradient_tolerance"] + 1e-12)
    for row, slopes in want.get("rows", {}).items():
        got = result.coefficients[int(row)][rollouts.mask[int(row)]]
        assert torch.allclose(got, tensor(slopes), rtol=0, atol=entry["tolerance"] + 1e-12)


def active(i: dict, name: str) -> torch.Tensor:
    """Scores of the experts that were active under the old router, behind a masked column."""
    top = tensor(i["router_logp_old"]).topk(i["active_experts"], -1).indices
    x = tensor(i[name]).gather(-1, top)
    return torch.cat([torch.zeros_like(x[:, :1]), x], 1)


@pytest.mark.parametrize(("i", "e"), cases("rspo"))
def test_rspo(i, e):
    router = {n: active(i, n) for n in ("router_logp_old", "router_logp")}
    i = {n: v for n, v in i.items() if n not in router}
    shift = RouterShift(floor=i["gamma_min"], layers=i["layer_agg"])
    same(shift.log_factor(view(shift, i, **router)).exp() * batch(i)[0].mask, e["gamma"])
    bare = RouterShift(floor=0.0, layers=i["layer_agg"])
    same(bare.log_factor(view(bare, i, **router)).exp() * batch(i)[0].mask, e["gamma_raw"])
    settings = {"floor": i["gamma_min"], "layers": i["layer_agg"]}
    name, prefix = {
        "sequence_post_clip": ("rspo", "ratio.shift"),
        "pre_clip": ("rspo-pre-clip", "ratio.shift"),
        "post_clip": ("rspo-post-clip", "weights.router_stability.shift"),
    }[i["variant"]]
    given = {f"{prefix}.{k}": v for k, v in settings.items()}
    if name == "rspo":
        given |= {"ratio.bound.low": i["log_clip"], "ratio.bound.high": i["log_clip"]}
    else:
        given |= {"surrogate.low": i["low"], "surrogate.high": i["high"]}
    result = evaluated(kenpo.get(name).with_settings(given), i, **router)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], rel=1e-9)
    same(result.coefficients, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("luffy"))
def test_luffy(i, e):
    origin = torch.tensor([2 if off else 0 for off in i["off_policy"]])
    known = i["variant"] == "behaviour_known"
    i = dict(i)
    if known:
        i["logp_sampler"] = i.pop("logp_behaviour")
    a = kenpo.get("luffy-known" if known else "luffy")
    if not known:
        a = a.with_settings({"ratio.expert.gamma": i["gamma"]})
    width = len(i["mask"][0])
    totals = {
        "sum_over_width": stages.FixedLength(length=width, rows=False),
        "sum_over_rows_and_width": stages.FixedLength(length=width),
        "token_mean": stages.TokenMean(),
    }
    for name, aggregate in totals.items():
        result = evaluated(a.but(aggregate=aggregate), i, origin=origin)
        assert float(result.loss.detach()) == pytest.approx(e[name]["loss"], rel=1e-9)
        same(result.coefficients, e[name]["coefficients"])
    same(result.advantages.amax(-1) + result.advantages.amin(-1), e["advantages"])


@pytest.mark.parametrize(("i", "e"), cases("dhpo_entropy"))
def test_dhpo_entropy(i, e):
    gradient = "sequence" if i["variant"].startswith("plain") else "token"
    clip = BranchClip(
        "entropy", i["token_clip"], i["token_clip"], i["low"], i["high"], SequenceRatio(gradient=gradient)
    )
    same(clip.mix(view(clip, i)), e["weights"])
    result = evaluated(kenpo.get("dhpo").but(surrogate=clip), i)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], rel=1e-9)
    same(result.coefficients, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("minpro_weights"))
def test_minpro_weights(i, e):
    ratio = stages.PrefixMinRatio(anchor="old")
    ctx = view(ratio, i)
    log_ratio, mask = ctx.log_ratio("old"), ctx.mask
    same(ratios.log_prefix_min(log_ratio, mask, strict=True).exp() * mask, e["prefix_min"])
    forms = {"": ratio, "_capped": stages.PrefixMinRatio(anchor="old", cap_prefix_at_one=True)}
    for end, form in forms.items():
        same(form(ctx) * mask, e[f"weights{end}"])
        same(form(ctx).clamp(1 - i["low"], 1 + i["high"]) * mask, e[f"clipped{end}"])
    same(stages.PrefixMinRatio(form="inclusive", anchor="old")(ctx) * mask, e["inclusive_min"])


@pytest.mark.parametrize(("i", "e"), cases("reco"))
def test_reco(i, e):
    stage = VarianceRatio()
    ctx = view(stage, i)
    same(stage(ctx) * ctx.mask, e["v"])
    same(ctx.log_ratio("old").exp() * ctx.mask, e["importance_ratio"])
    likely = InverseLikelihood()
    got = likely(view(likely, i))[0]
    old = [x for x, m in zip(i["logp_old"][0], i["mask"][0], strict=True) if m]
    assert float(got.amax()) == pytest.approx(math.exp(-sum(old) / len(old)))


@pytest.mark.parametrize(("i", "e"), cases("sis"))
def test_sis_position(i, e):
    """Each token of the vocabulary in turn as the sampled one."""
    old, new = tensor(i["old_probs"]), tensor(i["new_probs"])
    change, top = (new / old).log(), old.topk(i["top_k"]).indices
    inside = torch.zeros(len(old), dtype=torch.bool).index_fill(0, top, True)
    K = change[top].expand(len(old), -1)
    chance = sampling.acceptance(change, K, torch.ones_like(K, dtype=torch.bool), inside)
    same(chance, e["acceptance"])
    assert float((old * chance).sum()) == pytest.approx(e["acceptance_rate"])
    kept = (new / old).clamp(1 - i["low"], 1 + i["high"])
    same(old * (chance + (1 - chance) * kept), e["expected_weight_mass"])
    assert float(change[top].max().exp()) == pytest.approx(e["envelope"])


def test_the_draws_of_sis_are_uniform_and_seeded():
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(200, 50, generator=generator, dtype=torch.float64)
    tokens, mask = torch.randint(0, 9, (200, 50), generator=generator), torch.ones(200, 50, dtype=torch.bool)
    u = sampling.token_draws(tokens, logp, mask, 0)
    assert 0 <= float(u.min()) < 0.001
    assert 0.999 < float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(u.histc(10, 0, 1).std()) < 60  # of 1000 in each tenth
    assert float(torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1]) == pytest.approx(
        0, abs=0.03
    )
    assert not torch.equal(u, sampling.token_draws(tokens, logp, mask, 1))
    assert torch.equal(u[3:9], sampling.token_draws(tokens[3:9], logp[3:9], mask[3:9], 0))


@pytest.mark.parametrize(("i", "e"), cases("zcpo"))
def test_zcpo(i, e):
    B = len(i["rewards"])
    mask = torch.tensor([[False, True]] * B)
    D = torch.stack([torch.zeros(B).double(), tensor(i["divergence"])], 1)
    rollouts = kenpo.Rollouts(mask=mask, group=torch.tensor(i["group"]), rewards=tensor(i["rewards"]))
    policy = kenpo.Policy(logp=torch.full((B, 2), -1.0, dtype=torch.float64), kl_ref=D)
    a = kenpo.get("zcpo").with_settings({"advantage.beta": i["beta"]})
    same(kenpo.evaluate(a, rollouts, policy).advantages[:, 1], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("zcpo_divergence"))
def test_zcpo_divergence(i, e):
    """The mean over a response's tokens of what the policy hands in as kl_ref."""
    p, q = tensor(i["logits"]).log_softmax(-1), tensor(i["logits_ref"]).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    same(kenpo.ops.masked.row_mean(kl, torch.tensor(i["mask"]).bool()), e["divergence"])


@pytest.mark.parametrize(("i", "e"), cases("conspo"))
def test_conspo(i, e):
    a = kenpo.get("conspo").with_settings({"surrogate.tau": i["tau"], "surrogate.margin": i["margin"]})
    rollouts, policy = batch(i)
    rollouts = rollouts.replace(rewards=tensor([float(p) for p in i["positive"]]))
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.loss.detach()) == pytest.approx(e["loss"], rel=1e-9)
    same(result.coefficients, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("ggpo"))
def test_ggpo(i, e):
    def column(x):
        return torch.stack([torch.zeros(len(x)).double(), tensor(x)], 1)

    B = len(i["rewards"])
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * B),
        group=torch.zeros(B, dtype=torch.long),
        rewards=tensor(i["rewards"]),
        logp_ref=column(i["sequence_logp_ref"]),
    )
    a = kenpo.get("ggpo").with_settings({"surrogate.beta": i["beta"]})
    result = kenpo.evaluate(a, rollouts, kenpo.Policy(logp=column(i["sequence_logp"])))
    assert float(result.loss.detach()) == pytest.approx(e["loss"], rel=1e-9)
    same(result.coefficients[:, 1], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("reinforce_pp_kl"))
def test_reinforce_pp_kl(i, e):
    clip = {"surrogate.low": i["clip"], "surrogate.high": i["clip"]}
    if i["variant"] == "kl_in_reward":
        i = i | {"group": list(range(len(i["mask"])))}
        a = kenpo.get("reinforce_pp").with_settings(clip | {"advantage.beta": i["kl_coef"]})
    else:
        penalty = stages.KLToReference(beta=i["kl_coef"], estimator=i["variant"][-2:])
        a = kenpo.get("reinforce_pp_baseline").with_settings(clip).but(regularizers=(penalty,))
    result = evaluated(a, i)
    same(result.advantages, e["advantages"])
    assert float(result.loss.detach()) == pytest.approx(e["loss"], rel=1e-9)
    same(result.coefficients, e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("group_advantage"))
def test_group_advantage(i, e):
    rewards, group = tensor(i["rewards"]), torch.tensor(i["group"])
    everyone = torch.ones_like(group, dtype=torch.bool)
    same(groups.zscore(rewards, group, everyone, eps=1e-6, ddof=1), e["sample_std"])
    same(groups.zscore(rewards, group, everyone, eps=1e-4, ddof=1), e["sample_std_eps_1e-4"])
    same(groups.zscore(rewards, group, everyone, eps=1e-6, ddof=0), e["population_std"])
    same(groups.centred(rewards, group, everyone), e["centred"])
    same(groups.leave_one_out(rewards, group, everyone), e["leave_one_out"])
    same(groups.batch_scaled(rewards, group, everyone, eps=1e-4), e["batch_std"])


# -- numbers printed in the formula notes, one position at a time ------------------------------------------------------


def test_gppo_coefficients():
    r = tensor([1.5, 0.5, 1.5, 1.0, 12.0]).requires_grad_()
    a = tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    logp = r.detach().log().requires_grad_()
    value = surrogates.gradient_preserving_clip(logp.exp(), a, 0.2, 0.28)
    (slope,) = torch.autograd.grad(value.sum(), logp, retain_graph=True)
    same(slope, [1.28, -0.8, -1.5, 1.0, -12.0])
    (slope,) = torch.autograd.grad(surrogates.dual_clip(value, a, 10.0).sum(), logp)
    same(slope, [1.28, -0.8, -1.5, 1.0, 0.0])


def test_ripo_radius_and_bounds():
    radius = surrogates.chi_square_radius(tensor([0.01, 0.05, 0.2, 0.8]).log(), 0.05)
    same(radius, [math.sqrt(5), 1.0, 0.5, 0.25])
    i = {"mask": [[1, 1]], "logp_old": [[math.log(1e-6), math.log(0.2)]], "advantages": [1.0]}
    clip = stages.ChiSquareClip()
    assert torch.allclose(clip(tensor([[1.0, 20.0, 20.0]]), view(clip, i))[0, 1:], tensor([10.0, 1.5]))


@pytest.mark.parametrize(
    ("rho", "centre", "a", "want"),
    [(1.5, 1, 1, 1.2), (1.5, 1.5, 1, 1.5), (1.9, 1.5, 1, 1.7), (0.3, 0.5, -1, -0.3), (0.2, 0.5, -1, -0.3),
     (0.1, 0.1, -1, -0.1), (1.9, 1.5, -1, -1.9)],
)  # fmt: skip
def test_off_policy_clip(rho, centre, a, want):
    i = {"mask": [[1]], "logp_old": [[math.log(centre) - 1]], "logp_sampler": [[-1.0]], "advantages": [float(a)]}
    clip = stages.CentredClip()
    assert float(clip(tensor([[1.0, rho]]), view(clip, i))[0, 1]) == pytest.approx(want)


def test_erpo_query_numbers():
    i = {"mask": [[0, 0, 0, 1]], "logp": [[-1, -2, -0.5, -1.0]], "logp_ref": [[-1.2, -1.7, -0.5, -1.0]]}
    rollouts, policy = batch(i)
    rollouts = rollouts.replace(prompt_mask=torch.tensor([[False, True, True, True, False]]), logp_old=policy.logp)
    a = kenpo.get("erpo").with_settings({"regularizers.query_kl.alpha": 1.0})
    result = kenpo.evaluate(a, rollouts, policy)
    assert float(result.loss.detach()) == pytest.approx(0.022863187, abs=1e-9)
    assert torch.allclose(result.coefficients[0, 1:4], tensor([0.060423082, -0.116619603, 0.0]), atol=1e-9)
    level = a.with_settings({"regularizers.query_kl.level": "sequence"})
    assert float(kenpo.evaluate(level, rollouts, policy).loss.detach()) == pytest.approx(math.expm1(0.1) - 0.1)


def test_erpo_query_weight():
    s = tensor([20.0, 40.0, 60.0])
    ref = torch.stack([torch.zeros(3).double(), -s, torch.zeros(3).double()], 1)
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, False, True]] * 3), group=torch.zeros(3, dtype=torch.long), rewards=s,
        logp_ref=ref, prompt_mask=torch.tensor([[False, True, False]] * 3),
    )  # fmt: skip
    weight = stages.QueryWeight(average=40.0)
    ctx = order.view(stages.Context(rollouts, torch.ones(3, dtype=torch.bool)), weight)
    same(weight(ctx)[:, 2], [2.0, 1.0, 2 / 3])


@pytest.mark.parametrize(("k", "golden", "wrong"), [(0, 16 / 9, -2 / 9), (4, 8 / 9, -10 / 9), (8, 0.0, 0.0)])
def test_grin_advantages_fade_as_the_policy_learns(k, golden, wrong):
    rewards = tensor([2.0] + [2.0] * k + [0.0] * (8 - k))
    a = groups.centred(rewards, torch.zeros(9, dtype=torch.long), torch.ones(9, dtype=torch.bool))
    assert float(a[0]) == pytest.approx(golden)
    assert float(a[-1]) == pytest.approx(wrong)


def test_at_a_rare_token_grin_pulls_and_luffy_does_not():
    i = {"mask": [[1]], "logp": [[math.log(0.001)]], "logp_old": [[0.0]], "advantages": [16 / 9]}
    expert = {"origin": torch.tensor([2])}
    shaped = evaluated(kenpo.get("luffy").with_settings({"aggregate.length": 1}), i, **expert)
    assert float(shaped.coefficients[0, 1]) == pytest.approx(-0.017427, abs=1e-6)
    golden = evaluated(kenpo.get("grin").but(regularizers=()), i, **expert)
    assert float(golden.coefficients[0, 1]) == pytest.approx(-1.777778, abs=1e-6)


@pytest.mark.parametrize(("margin", "tau", "want"), [(0.0, 1.0, 1.215226856), (0.1, 0.1, 1.500638719)])
def test_conspo_printed_scores(margin, tau, want):
    score, right = tensor([-0.3, -0.5, -0.4, -0.6, -1.0]), torch.tensor([True, True, False, False, False])
    everyone = torch.ones(5, dtype=torch.bool)
    value = contrast.info_nce(score, right, torch.zeros(5, dtype=torch.long), everyone, tau=tau, margin=margin)
    assert -float(value.sum()) == pytest.approx(want, abs=1e-9)
