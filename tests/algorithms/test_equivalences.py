"""Methods that are one another at some setting, and variants that differ where their pages say so."""

from __future__ import annotations

import math

import pytest
import torch
from laws.build import same, tensors
from laws.catalogue import algorithm, options
from reference import WIDER
from reference.cases import make_case

import kenpo
from algorithms.golden import tensor
from kenpo import stages
from kenpo.errors import InputError, ScopeError
from kenpo.order import view

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = range(12)
FREE = {"surrogate.low": 1.0, "surrogate.high": 1e9}  # a clip that never acts


def get(name: str, **settings) -> kenpo.Algorithm:
    return kenpo.get(name).with_settings({k.replace("__", "."): v for k, v in settings.items()})


def coefficients(a: kenpo.Algorithm, seed: int, **more) -> torch.Tensor:
    return kenpo.evaluate(a, *tensors(make_case(seed, **(options("rspo") | more)))).coefficients


def unbounded(ratio):
    return kenpo.get("gmpo").but(ratio=ratio)


PAIRS = {
    "GSPO with token sums is LUSPO": (
        get("gspo", surrogate__low=0.1, surrogate__high=0.3).but(aggregate=stages.SequenceSum()),
        get("luspo", surrogate__low=0.1, surrogate__high=0.3),
    ),
    "GMPO without a bound is GSPO without a clip": (
        unbounded(stages.SequenceRatio()),
        kenpo.get("gspo").but(surrogate=stages.Linear()),
    ),
    "PMPO at p = 0 is GMPO": (get("pmpo", ratio__p=0.0), kenpo.get("gmpo")),
    "SSPO's other gate with a small kappa is GSPO without a clip": (
        get("sspo-arctan", surrogate__kappa=1e-6),
        kenpo.get("gspo").but(surrogate=stages.Linear()),
    ),
    "DHPO at w = 1 is GRPO without KL": (get("dhpo", surrogate__weight=1.0), get("grpo", regularizers=[])),
    "DHPO at w = 0 is GSPO-token": (get("dhpo", surrogate__weight=0.0), kenpo.get("gspo_token")),
    "plain DHPO at w = 0 is GSPO": (get("dhpo-plain", surrogate__weight=0.0), kenpo.get("gspo")),
    "the two forms of DHPO are one while nothing clips": (
        get("dhpo", surrogate__token_low=1.0, surrogate__token_high=1e9, surrogate__sequence_low=1.0,
            surrogate__sequence_high=1e9),
        get("dhpo-plain", surrogate__token_low=1.0, surrogate__token_high=1e9, surrogate__sequence_low=1.0,
            surrogate__sequence_high=1e9),
    ),
    "gmpo-literal at equal bounds is GMPO": (kenpo.get("gmpo-literal"), kenpo.get("gmpo")),
    "GPPO without a clip is DAPO's loss without one": (
        get("gppo", **FREE), get("dapo", **FREE, selection=[])),
    "RIPO between its floor and cap only is a clip": (
        get("ripo", surrogate__delta=1e6, surrogate__floor=0.8, surrogate__cap=1.28), get("dapo", selection=[])),
    "RSPO with a floor of 1 is GMPO": (get("rspo", ratio__shift__floor=1.0), kenpo.get("gmpo")),
    "token RSPO with a floor of 1 is GRPO": (
        get("rspo-pre-clip", ratio__shift__floor=1.0), get("grpo", regularizers=[])),
    "a group's point intervals are Dr. GRPO": (algorithm("range_grpo"), algorithm("dr_grpo")),
    "GRIN without experts is centred, clipped and token-averaged": (
        kenpo.get("grin").but(regularizers=()),
        get("grpo", regularizers=[]).but(advantage=stages.GroupCentred(), aggregate=stages.TokenMean()),
    ),
    "LUFFY without experts is Dr. GRPO without a clip": (
        algorithm("luffy").with_settings({"aggregate.rows": True}),
        algorithm("dr_grpo").but(surrogate=stages.Linear()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_one_method_is_another(pair):
    first, second = pair
    for seed in SEEDS:
        rollouts, policy = tensors(make_case(seed, router=(2, 2)))
        rollouts = rollouts.replace(origin=torch.zeros(len(rollouts), dtype=torch.long))
        x, y = (kenpo.evaluate(a, rollouts, policy).coefficients for a in (first, second))
        assert same(x, y, 1e-5 if "kappa" in str(first.diff(second)) else 1e-10), seed


def test_luspo_is_gspo_times_the_length():
    for seed in SEEDS:
        rollouts, policy = tensors(make_case(seed))
        wide = {"surrogate.low": 0.1, "surrogate.high": 0.3}
        x, y = (kenpo.evaluate(get(n).with_settings(wide), rollouts, policy).coefficients for n in ("luspo", "gspo"))
        assert same(x, y * rollouts.mask.sum(-1, keepdim=True))


def test_pmpo_at_one_is_the_arithmetic_mean_of_wide_clipped_ratios():
    """A clip to (e^−.4, e^.4) on the side that A pushes; beyond it, as in PPO's clip, no gradient."""
    wide = stages.Clip(low=1 - math.exp(-0.4), high=math.exp(0.4) - 1)
    plain = get("grpo", regularizers=[]).but(surrogate=wide)
    for seed in SEEDS:
        assert same(coefficients(get("pmpo", ratio__p=1.0), seed), coefficients(plain, seed)), seed


def test_pmpo_approaches_gmpo():
    for seed in SEEDS:
        assert same(coefficients(get("pmpo", ratio__p=1e-7), seed), coefficients(kenpo.get("gmpo"), seed), 1e-6)


def effective_size(d, mask, p):
    return ((p * d).exp() * mask).sum(-1) ** 2 / ((2 * p * d).exp() * mask).sum(-1)


def test_pmpo_meets_its_target():
    """ESS(p) = (1−f)·ESS(1) + f·n on every response, also in float32; p is 1 without clipped tokens."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        generator = torch.Generator().manual_seed(1)
        d = 0.4 * torch.randn(64, 50, generator=generator, dtype=torch.float64).to(dtype)
        mask = torch.rand(64, 50, generator=generator) < 0.8
        held = (d > 0.4) & mask
        d = d.clamp(max=0.4)
        p = kenpo.ops.ratios.ess_exponent(d, held, mask)
        f, n = held.sum(-1).to(dtype) / mask.sum(-1), mask.sum(-1)
        want = (1 - f) * effective_size(d, mask, torch.ones_like(p)) + f * n
        assert torch.allclose(effective_size(d, mask, p), want, rtol=tolerance)
        assert bool(((p >= 0) & (p <= 1)).all())
        assert bool((p.squeeze(-1)[f == 0] == 1).all())


def test_rloo_is_the_centred_reward_times_g_over_g_minus_one():
    for seed in SEEDS:
        rollouts, policy = tensors(make_case(seed))
        size = torch.stack([(rollouts.group == g).sum() for g in rollouts.group]).double()
        centred = kenpo.evaluate(kenpo.get("rloo").but(advantage=stages.GroupCentred()), rollouts, policy)
        factor = torch.where(size > 1, size / (size - 1).clamp(min=1), 0.0).unsqueeze(-1)
        assert same(kenpo.evaluate(kenpo.get("rloo"), rollouts, policy).coefficients, centred.coefficients * factor)


@pytest.mark.parametrize("name", ["rspo", "pmpo", "pmpo-half", "dhpo", "sspo-arctan", "off_policy_grpo"])
def test_on_policy_sequence_means_have_grpos_gradient(name):
    rollouts, policy = tensors(make_case(5, router=(2, 2)))
    rollouts = rollouts.replace(logp_old=policy.logp, logp_sampler=policy.logp, router_logp_old=policy.router_logp)
    a = kenpo.get(name).but(advantage=stages.GroupZScore())
    want = kenpo.evaluate(get("grpo", regularizers=[]), rollouts, policy).coefficients
    assert same(kenpo.evaluate(a, rollouts, policy).coefficients, want, 1e-12)


@pytest.mark.parametrize("name", ["cispo-floor", "cispo-mask", "gppo-dual", "minpro-inclusive", "sis", "zcpo"])
def test_on_policy_the_others_have_their_parents(name):
    """SIS is GRPO, ZCPO without divergence is DAPO up to the scale of A, the variants are their parents."""
    rollouts, policy = tensors(make_case(5, topk=3))
    rollouts = rollouts.replace(logp_old=policy.logp, logp_sampler=policy.logp, topk_logp_old=policy.topk_logp)
    a = kenpo.get(name)
    if name == "zcpo":
        policy = policy.replace(kl_ref=torch.zeros_like(policy.logp))
        parent = a.but(advantage=stages.GroupCentred())
        got, want = (kenpo.evaluate(x, rollouts, policy).coefficients for x in (a, parent))
        assert torch.equal(got.sign(), want.sign())
        return
    parent = get("grpo", regularizers=[]) if name == "sis" else kenpo.get(name.split("-")[0])
    assert same(*(kenpo.evaluate(x, rollouts, policy).coefficients for x in (a, parent)), 1e-12)


DIFFERENT = [
    ("gmpo-literal", {"ratio.bound.high": 0.5}, "gmpo", {"ratio.bound.low": 0.2, "ratio.bound.high": 0.5}),
    ("pmpo", {}, "pmpo-half", {}),
    ("pmpo", {}, "gmpo", {}),
    ("sspo", {}, "sspo-arctan", {}),
    ("dhpo", {}, "dhpo-entropy", {}),
    ("dhpo", {}, "dhpo-plain", {}),
    ("cispo", {}, "cispo-floor", {}),
    ("cispo", {}, "cispo-mask", {}),
    ("dapo", {}, "dapo-paper-denominator", {}),
    ("minpro", {}, "minpro-inclusive", {}),
    ("minpro", {}, "minpro", {"ratio.cap_prefix_at_one": True}),
    ("rspo-pre-clip", {}, "rspo-post-clip", {}),
    ("rspo", {}, "rspo", {"ratio.shift.layers": "product", "ratio.shift.floor": 0.1}),
    ("rspo", {"ratio.shift.layers": "fork_product", "ratio.shift.floor": 0.1},
     "rspo", {"ratio.shift.layers": "fork_geometric", "ratio.shift.floor": 0.1}),
    ("rspo", {}, "rspo", {"ratio.shift.placement": "pre_clip"}),
    ("gspo", {**FREE}, "gspo", {**FREE, "ratio.pool": "product"}),
    ("gppo", {}, "gppo-dual", {"surrogate.dual": 1.3}),
    ("sis", {}, "sis", {"ratio.seed": 1}),
    ("luffy", {"aggregate.length": 7}, "luffy-known", {"aggregate.length": 7}),
    ("grin", {}, "grin", {"surrogate.floor": 0.0}),
    ("erpo", {}, "erpo", {"regularizers.query_kl.level": "sequence"}),
    ("zcpo", {}, "zcpo", {"advantage.beta": 0.0}),
    ("reinforce_pp", {}, "reinforce_pp", {"advantage.beta": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("first", "settings", "second", "others"), DIFFERENT)
def test_an_option_has_an_effect(first, settings, second, others):
    extra = {"router": (2, 2), "experts": True, "query": True}
    found = False
    for seed in SEEDS:
        rollouts, policy = tensors(make_case(seed, topk=3 if first == "sis" else 0, **extra))
        x, y = (
            kenpo.evaluate(kenpo.get(n).with_settings(s), rollouts, policy)
            for n, s in ((first, settings), (second, others))
        )
        found = found or not same(x.coefficients, y.coefficients, 1e-6)
    assert found


def test_router_placement_on_policy():
    """A drifted router silences a token of a bad response if γ stands before the clip, and weighs it if behind."""
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * 2), group=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0]),
        logp_old=torch.tensor([[0.0, -1.0]] * 2), router_logp_old=torch.zeros(2, 2, 1, 1) - 1,
    )  # fmt: skip
    gamma = 0.715785
    policy = kenpo.Policy(
        logp=torch.tensor([[0.0, -1.0]] * 2), router_logp=torch.full((2, 2, 1, 1), -1 + math.log(gamma))
    )
    low = {"floor": 0.5}
    before = kenpo.evaluate(get("rspo-pre-clip", ratio__shift__floor=0.5), rollouts, policy).coefficients[:, 1]
    behind = kenpo.get("rspo-post-clip").but(weights=(stages.RouterStability(stages.RouterShift(**low)),))
    after = kenpo.evaluate(behind, rollouts, policy).coefficients[:, 1]
    assert float(before[1]) == 0
    assert float(before[0]) < 0
    assert torch.allclose(after, gamma * torch.tensor([-0.5, 0.5]) * 0.7071058, rtol=1e-5)


# -- the wider family against its plain references ---------------------------------------------------------------------


def draws(a, rollouts, policy) -> dict:
    ctx = view(stages.Context(rollouts, kenpo.select(a, rollouts), policy), a.ratio)
    return {"uniforms": a.ratio.draws(ctx).tolist()}


SEVEN = {"aggregate.length": 7}
REFERENCED = [
    ("zcpo", {}, {}), ("zcpo", {"advantage.beta": 20.0}, {"beta": 20.0}),
    ("reco", {}, {}), ("sis", {}, {}), ("sis", {"ratio.seed": 3}, {}),
    ("conspo", {}, {}), ("conspo", {"surrogate.tau": 0.5, "surrogate.margin": 0.2}, {"tau": 0.5, "margin": 0.2}),
    ("ggpo", {}, {}), ("ggpo", {"surrogate.beta": 0.5}, {"beta": 0.5}),
    ("range_grpo", SEVEN, {"length": 7}), ("luffy", SEVEN, {"width": 7}),
    ("luffy-known", SEVEN, {"width": 7, "behaviour": "logp_sampler"}),
    ("grin", {}, {}), ("grin", {"surrogate.floor": 0.0}, {"floor": 0.0}), ("erpo", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "numbers"), REFERENCED)
@pytest.mark.parametrize("gap", ["none", "usual", "extreme"])
def test_the_wider_family_equals_its_references(name, settings, numbers, gap):
    if (name, gap) == ("reco", "extreme"):
        pytest.skip("the plain reference does not saturate")
    a = kenpo.get(name).with_settings(settings)
    for seed in range(8):
        case = make_case(seed, gap=gap, fresh=seed % 4 == 3, no_verdict=seed % 3 == 2, **options(name))
        rollouts, policy = tensors(case)
        more = draws(a, rollouts, policy) if name == "sis" else {}
        loss, want, _, _ = WIDER[name.split("-")[0]](case, **numbers, **more)
        result = kenpo.evaluate(a, rollouts, policy)
        assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-9), seed
        assert torch.allclose(result.coefficients, tensor(want), rtol=1e-9, atol=1e-10), seed


def test_erpo_with_its_query_weight():
    a = kenpo.get("erpo").but(weights=(stages.QueryWeight(average=4.0),))
    for seed in SEEDS:
        case = make_case(seed, query=True)
        loss, want, _, weights = WIDER["erpo"](case, average_surprisal=4.0)
        result = kenpo.evaluate(a, *tensors(case))
        assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-9)
        assert torch.allclose(result.coefficients, tensor(want), rtol=1e-9, atol=1e-12)
        assert torch.allclose(result.weights, tensor(weights))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 1.0, 0.5])
def test_the_shifted_form_is_refused_for_negative_advantages(p):
    a = kenpo.get("gmpo").but(ratio=stages.TokenRatio(), surrogate=stages.ShiftedMean(p=p))
    rollouts, policy = tensors(make_case(1))
    with pytest.raises(InputError, match="negative advantage makes shift"):
        kenpo.evaluate(a, rollouts, policy)


def test_the_shifted_form_on_positive_advantages():
    class Positive(stages.Advantage):
        def __call__(self, rewards, ctx, state):
            return ctx.per_token(rewards * 0 + 2.0), state

    rollouts, policy = tensors(make_case(1))
    a = kenpo.get("gmpo").but(advantage=Positive(), ratio=stages.TokenRatio(), surrogate=stages.ShiftedMean(p=1.0))
    plain = get("grpo", regularizers=[]).but(advantage=Positive())
    assert same(*(kenpo.evaluate(x, rollouts, policy).coefficients for x in (a, plain)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stages.TokenRatio(shift=stages.RouterShift()), "RouterStability"),
        (lambda: stages.PowerRatio(p="ess", bound=None), "give p a number"),
        (lambda: stages.PowerRatio(p=1.5), "p must be in"),
        (lambda: stages.PrefixMinRatio(form="inclusive", cap_prefix_at_one=True), "no prefix factor"),
        (lambda: stages.GlobalWhiten(baseline="group", beta=0.1), "KL belongs in the loss"),
        (lambda: stages.BranchClip(weight=2.0), "weight must be in"),
        (lambda: stages.LogClip(low=-0.1), "distances"),
        (lambda: stages.DualClip(dual=0.5), "dual must exceed 1"),
        (lambda: stages.ChiSquareClip(floor=2.0), "floor ≤ 1 ≤ cap"),
        (lambda: stages.ShapedProbability(gamma=0.0), "gamma must be positive"),
        (lambda: stages.RouterShift(floor=2.0), "floor must be in"),
        (lambda: get("pmpo", ratio__p="half"), "'half' is not a number or 'ess'"),
    ],
)
def test_numbers_without_a_meaning_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_late_advantage_wants_whole_groups():
    rollouts, policy = tensors(make_case(1))
    a = kenpo.get("zcpo")
    prepared = kenpo.prepare(a, rollouts)
    big = (rollouts.group == rollouts.group.mode().values).nonzero().squeeze(-1)
    with pytest.raises(ScopeError, match="zero_sum_kl"):
        kenpo.weigh(a, prepared[big[:1]], policy[big[:1]])


def test_a_scored_prompt_may_not_start_at_column_0_nor_hold_nan():
    rollouts, policy = tensors(make_case(1, query=True))
    a = kenpo.get("erpo")
    moved = rollouts.prompt_mask.clone()
    moved[0, 0] = True
    with pytest.raises(InputError, match="position 0"):
        kenpo.evaluate(a, rollouts.replace(prompt_mask=moved), policy)
    row, token = rollouts.prompt_mask.nonzero()[0].tolist()
    policy.logp[row, token] = math.nan
    with pytest.raises(InputError, match=rf"logp.*\[{row}, {token}\]"):
        kenpo.evaluate(a, rollouts, policy)


def test_a_router_score_that_is_nan_is_named():
    rollouts, policy = tensors(make_case(1, router=(2, 2)))
    row, token = rollouts.mask.nonzero()[0].tolist()
    policy.router_logp[row, token, 0, 0] = math.nan
    with pytest.raises(InputError, match=rf"router_logp.*\[{row}, {token}\]"):
        kenpo.evaluate(kenpo.get("rspo"), rollouts, policy)
