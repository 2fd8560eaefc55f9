"""What weights do in company: compositions, refusals, equivalences, batches seen whole, and the warning."""

from __future__ import annotations

import dataclasses
import random
import warnings

import pytest
import torch
from laws.build import cut, same, shuffled, tensors, widened
from reference.cases import make_case
from reference.variants import m2po_weight_moment

import kenpo
from kenpo import metrics
from kenpo.errors import IllegalCombinationError, InputError, LongResponseWarning, NoDivergenceWarning, ScopeError
from kenpo.ops import divergences, trust
from kenpo.stages import (
    BinaryKLMask,
    CentredClip,
    DivergenceMask,
    GroupMass,
    MaskedIS,
    MomentClip,
    Rejection,
    Rule,
    SecondMoment,
    SequenceKLMask,
    SpuriousTokens,
    Surprisal,
    TokenMean,
    TokenRatio,
    TruncatedIS,
)

CORRECTIONS = ["truncated_is", "masked_is", "binary_kl_mask", "correction_moment"]
#: Algorithms that decide over a whole group or minibatch.
WHOLE = [
    "m2po",
    "m2po-code",
    "m2po-areal",
    "m2po-weight-moment",
    "stapo",
    "stapo-soft",
    "stare",
    "stare-c2",
    "gmc_grpo",
]


def example(seed=0, **options):
    return tensors(make_case(seed, **({"groups": 6, "width": 14} | options)))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(metrics, "_WARNED", set())


# -- compositions ----------------------------------------------------------------------------------------------------


def composed():
    gspo, dapo, sapo, cispo = (kenpo.get(n) for n in ("gspo", "dapo", "sapo", "cispo"))
    yield "gspo with IcePop", gspo.but(weights=kenpo.get("icepop").weights)
    yield "gspo with KPop and OPSM", gspo.but(weights=(BinaryKLMask(), *kenpo.get("opsm").weights))
    yield "dapo with M2PO and STAPO", dapo.but(weights=(SecondMoment(), SpuriousTokens(probability=0.3)))
    yield "dapo with sequence TIS", dapo.but(weights=(TruncatedIS(level="sequence", normalise=True),))
    yield "sapo with MIS and rejection", sapo.but(weights=(MaskedIS(), Rejection((Rule("seq_max_k2", upper=0.05),))))
    yield "cispo with DPPO's mask", cispo.but(weights=(DivergenceMask(anchor="old"),))
    yield "rloo with TIS", kenpo.get("rloo").adding("truncated_is")
    grpo = kenpo.get("grpo").but(regularizers=())
    yield "grpo with three by name", grpo.adding("masked_is").adding("second_moment").adding("surprisal")


@pytest.mark.parametrize(("_", "a"), list(composed()), ids=[n for n, _ in composed()])
def test_weights_compose_by_multiplication(_, a):
    for seed in range(6):
        rollouts, policy = example(seed)
        whole = kenpo.evaluate(a, rollouts, policy)
        product = torch.ones_like(whole.weights)
        for stage in a.weights:
            product = product * kenpo.evaluate(a.but(weights=(stage,)), rollouts, policy).weights
        assert same(whole.weights, product, 1e-12)
        assert bool((whole.weights >= 0).all())
        if a.ratio is None or a.ratio.span == kenpo.Scope.TOKEN:
            assert not bool(whole.coefficients[rollouts.mask & (whole.weights == 0)].any())


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["dppo", "trm", "m2po", "minpro", "off_policy_grpo", "mini_rl"])
def test_a_correction_does_not_meet_a_ratio_to_the_sampler(name, correction):
    with pytest.raises(IllegalCombinationError, match=rf"{name}: {correction} .*counted twice"):
        kenpo.get(name).adding(correction)


def test_a_corrections_numerator_is_the_ratios_denominator():
    with pytest.raises(IllegalCombinationError, match="same anchor"):
        kenpo.get("missing_old_logits").but(ratio=TokenRatio())
    with pytest.raises(IllegalCombinationError, match="same anchor"):
        kenpo.get("tis").but(weights=(TruncatedIS(anchor="prox"),))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TruncatedIS(cap=0), "cap must be positive"),
        (lambda: MaskedIS(floor=2.0, cap=1.0), "floor < cap"),
        (lambda: SequenceKLMask(max=None, mean=None), "set max or mean"),
        (lambda: DivergenceMask(buckets="top_k", anchor="old"), "anchor='sampler'"),
        (lambda: Rule("seq_mean_k1", upper=1.1, lower=0.9), "needs band_on"),
        (lambda: Rule("seq_mean_k1", upper=1.1, band_on="rho"), "needs lower"),
        (lambda: Rule("token_k3", upper=0.1, lower=0.0), "no lower bound"),
        (lambda: Rejection(()), "at least one rule"),
        (lambda: Rejection([{"statistic": "token_k2"}]), "its fields are"),
        (lambda: Rejection(["token_k2"]), "a rule is an object"),
        (lambda: SpuriousTokens(scope="everything"), "scope"),
        (lambda: SpuriousTokens(quantile=1.5), "quantile"),
        (lambda: GroupMass(cap=0), "cap"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("off_policy_sequences", "delta", 0.5),
        ("group_mass", "cap", 2.0),
        ("rejection", "rules", [{"statistic": "seq_max_k2", "upper": 0.5}]),
    ],
)
def test_what_has_no_default_must_be_given(name, field, value):
    key = f"weights.{name}.{field}"
    base = kenpo.get("rloo")
    with pytest.raises(InputError, match=rf"{name} has no default for {key}"):
        base.adding(name)
    made = kenpo.resolve("rloo", {key: value, "aggregate.over": "kept"}, [name])
    assert made.settings()[key] == (made.weights[0].rules if name == "rejection" else value)
    assert made.aggregate.over == "kept"


def test_a_slot_may_be_emptied_and_filled_in_one_call():
    made = kenpo.resolve("grpo", {"regularizers": [], "regularizers.kl_to_reference.beta": 0.5}, ["kl_to_reference"])
    assert [type(r).__name__ for r in made.regularizers] == ["KLToReference"]
    assert made.regularizers[0].beta == 0.5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kenpo.get("mis").adding("truncated_is"), "both weigh by π_old/μ"),
        (lambda: kenpo.get("tis").adding("masked_is"), "both weigh by π_old/μ"),
        (lambda: kenpo.get("grpo").but(weights=(GroupMass(cap=2.0),)), "is a ratio of π_θ itself"),
        (lambda: kenpo.get("grpo").but(surrogate=CentredClip()), "anchored at 'sampler'"),
        (lambda: kenpo.get("off_policy_grpo").with_settings({"ratio.anchor": "old"}), "anchored at 'sampler'"),
    ],
)
def test_ratios_are_not_multiplied_by_accident(make, says):
    with pytest.raises(IllegalCombinationError, match=says):
        make()


def test_a_mask_may_stand_beside_a_correction():
    kenpo.get("mis").adding("binary_kl_mask")
    kenpo.get("tis").adding("correction_moment")
    with pytest.raises(IllegalCombinationError, match="both weigh"):
        kenpo.get("tis").but(weights=(TruncatedIS(), BinaryKLMask(keep_rho=True)))


@pytest.mark.parametrize("budget", [0.7, 1.0, 1.04, 1.5, 3.0])
def test_only_outward_tokens_are_masked_by_their_weight(budget):
    """M2PO by the second moment of the weight, restricted: against the plain-Python form."""
    a = kenpo.get("m2po-weight-moment").with_settings({"weights.weight_moment.outward": True,
                                               "weights.weight_moment.budget": budget})  # fmt: skip
    dropped = 0
    for seed in range(20):
        case = make_case(seed, gap=("usual", "extreme")[seed % 2])
        _, coefficients, _, weights = m2po_weight_moment(case, budget=budget, only_outward=True)
        result = kenpo.evaluate(a, *tensors(case))
        assert torch.equal(result.weights, torch.tensor(weights, dtype=torch.float64))
        assert torch.allclose(result.coefficients, torch.tensor(coefficients, dtype=torch.float64), atol=1e-12)
        dropped += int((result.weights == 0).sum())
    assert dropped


def test_settings_reach_every_knob():
    a = kenpo.get("stapo").with_settings({"weights.spurious_tokens.scope": "batch"})
    assert a.weights[0].scope == "batch"
    assert a.scope == kenpo.Scope.BATCH  # the reach, not the knob of that name
    rules = [{"statistic": "seq_max_k2", "upper": 0.5}]
    assert kenpo.get("rejection").with_settings({"weights.rejection.rules": rules}).weights[0].rules[0].upper == 0.5


# -- equivalences ----------------------------------------------------------------------------------------------------


def equal(a, b, **options):
    for seed in range(5):
        rollouts, policy = example(seed, **options)
        first, second = kenpo.evaluate(a, rollouts, policy), kenpo.evaluate(b, rollouts, policy)
        assert same(first.coefficients, second.coefficients, 1e-12)


def test_icepop_is_grpo_with_mis_and_a_wider_band():
    grpo = kenpo.get("grpo").but(regularizers=())
    equal(kenpo.get("icepop"), grpo.but(weights=(MaskedIS(floor=0.5, cap=5.0),)))
    equal(kenpo.get("icepop"), kenpo.get("online_icepop"), fresh=True)


def test_open_bounds_leave_the_parent():
    linear = kenpo.get("dppo").but(weights=())
    equal(kenpo.get("dppo").with_settings({"weights.divergence_mask.threshold": 10.0}), linear)
    equal(kenpo.get("m2po").with_settings({"weights.second_moment.budget": 1e9}), kenpo.get("m2po").but(weights=()))
    equal(kenpo.get("trm").with_settings({"weights.sequence_kl_mask.max": 1e9}), kenpo.get("trm").but(weights=()))
    uncapped = kenpo.get("tis").but(weights=(TruncatedIS(cap=None),))
    equal(uncapped, kenpo.get("mis").but(weights=(MaskedIS(floor=0.0, cap=1e9),)))
    equal(
        kenpo.get("stapo-soft").with_settings({"weights.spurious_tokens.weight": 1.0}),
        kenpo.get("stapo").but(weights=()),
    )


def test_rejecting_by_the_largest_k2_is_trms_gate_when_the_policy_is_old():
    a = kenpo.get("trm").but(ratio=TokenRatio())
    b = a.but(weights=(Rejection((Rule("seq_max_k2", upper=0.05),)),))
    equal(a, b, fresh=True)


def test_the_binary_tv_mask_is_symmetric_and_the_kl_is_not():
    """Under exchange of μ and π_θ together with A's sign."""
    rng, differs = random.Random(0), False
    for _ in range(200):
        p, q = (torch.tensor([rng.uniform(0.01, 0.99)]).double().log() for _ in range(2))
        a = torch.tensor([rng.choice([-1.0, 1.0])]).double()
        for kind in ("tv", "kl"):
            d = divergences.binary_tv if kind == "tv" else divergences.binary_kl
            one = (d(p, q) > 0.1) & trust.outward(q - p, a)
            two = (d(q, p) > 0.1) & trust.outward(p - q, -a)
            if kind == "tv":
                assert torch.equal(one, two)
            else:
                differs |= bool(one != two)
    assert differs


def test_a_rejected_response_has_exactly_no_gradient_and_stays_in_the_mean():
    logp, zero = (
        torch.tensor([[0.0, 1.1, 0.9], [0.0, 3.0, 1.0]]).double().clamp(min=1e-9).log(),
        torch.zeros(2, 3).double(),
    )
    mask = torch.tensor([[0, 1, 1], [0, 1, 1]]).bool()
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0]).double(), logp_sampler=zero
    )
    for limit, aggregate, factor in (
        (0.05, kenpo.get("trm").aggregate, 0.5),
        (0.05, TokenMean("kept"), 0.5),
        (0.05, TokenMean(), 0.25),
    ):
        a = kenpo.get("trm").but(weights=(SequenceKLMask(max=limit),), aggregate=aggregate)
        result = kenpo.evaluate(a, rollouts, kenpo.Policy(logp=logp))
        assert not bool(result.coefficients[1].any())
        assert torch.allclose(result.coefficients[0, 1:], -result.advantages[0, 1:] * logp[0, 1:].exp() * factor)


# -- normalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [TruncatedIS(normalise=True), MaskedIS(normalise=True)])
def test_normalised_token_weights_have_mean_one(stage):
    rollouts, policy = example(3)
    result = kenpo.evaluate(kenpo.get("tis").but(weights=(stage,)), rollouts, policy)
    assert float(result.weights[rollouts.mask].mean()) == pytest.approx(1.0)


def test_normalised_sequence_weights_have_mean_one_over_responses():
    rollouts, policy = example(3)
    stage = TruncatedIS(level="sequence", normalise=True)
    weights = kenpo.evaluate(kenpo.get("tis").but(weights=(stage,)), rollouts, policy).weights
    filled = rollouts.mask.any(-1)
    assert float(weights.amax(-1)[filled].mean()) == pytest.approx(1.0)
    assert stage.span == kenpo.Scope.BATCH


# -- batches seen whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_minibatch_decides_whatever_the_rows_order(name):
    for seed in range(6):
        rollouts, policy = example(seed, fresh=seed % 2 == 1)
        a, order = kenpo.get(name), shuffled(len(rollouts), seed)
        weights = kenpo.evaluate(a, rollouts, policy).weights
        assert same(kenpo.evaluate(a, rollouts[order], policy[order]).weights, weights[order], 1e-14)
        batch = kenpo.weigh(a, kenpo.prepare(a, rollouts), policy)
        if batch.weights is not None:
            for rows in cut(len(rollouts), 2):
                assert torch.equal(kenpo.objective(a, batch[rows], policy[rows]).weights, weights[rows])


@pytest.mark.parametrize("name", [n for n in WHOLE if n not in ("m2po-areal", "gmc_grpo")])
def test_one_phase_is_refused(name):
    rollouts, _ = example()
    a = kenpo.get(name)
    with pytest.raises(ScopeError, match="two phases"):
        kenpo.weigh(a, kenpo.prepare(a, rollouts))


def test_areals_budget_needs_no_policy_once_pi_old_is_scored():
    a = kenpo.get("m2po-areal")
    rollouts, policy = example()
    assert a.two_phase(rollouts) is None
    early = kenpo.weigh(a, kenpo.prepare(a, rollouts))
    assert torch.equal(early.weights, kenpo.evaluate(a, rollouts, policy).weights)
    assert a.two_phase(rollouts.replace(logp_old=None)) is not None


@pytest.mark.parametrize(
    "stage", [SecondMoment(budget=0.01, approximate="microbatch"), Surprisal(approximate="microbatch")]
)
def test_the_microbatch_approximation_runs_in_one_phase_and_depends_on_the_cut(stage):
    a = kenpo.get("m2po").but(weights=(stage,))
    differs = False
    for seed in range(8):
        rollouts, policy = example(seed)
        policy = policy.replace(entropy=policy.entropy * 0.1)
        assert a.two_phase(rollouts) is None
        batch = kenpo.weigh(a, kenpo.prepare(a, rollouts))
        pieces = torch.cat([kenpo.objective(a, batch[r], policy[r]).weights for r in cut(len(rollouts), 3)])
        differs |= not torch.equal(pieces, kenpo.evaluate(a, rollouts, policy).weights)
    assert differs


def test_ties_at_the_cut_share_one_fate():
    values, chosen = torch.tensor([0.09, 0.09, 0.09, 0.01]).double(), torch.ones(4).bool()
    assert trust.within_moment(values, chosen, 0.04).tolist() == [False, False, False, True]
    assert trust.within_moment(values, chosen, 0.001, least=True, strict=True).tolist() == [False, False, False, True]
    assert not bool(trust.within_moment(values, chosen, 0.001).any())
    assert trust.top_fraction(values, chosen, 0.1).tolist() == [True, True, True, False]


def test_the_budget_against_dropping_one_by_one():
    """The selection that sorts only the large values equals the paper's loop."""
    rng = random.Random(1)
    for _ in range(300):
        values = [rng.choice([rng.expovariate(20), 0.09]) for _ in range(rng.randint(0, 12))]
        budget, left = rng.choice([0.01, 0.04, 0.1]), sorted(values)
        while left and sum(left) / len(left) > budget:
            left = [v for v in left if v < left[-1]]
        kept = trust.within_moment(torch.tensor(values).double(), torch.ones(len(values)).bool(), budget)
        assert sorted(v for v, k in zip(values, kept.tolist(), strict=True) if k) == left


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("budget", [0.0, 0.01, 0.3, 1.0, 1.5, 50.0])
def test_a_budget_over_many_tokens(budget, least, monkeypatch):
    """The same tokens stay whether the cut is narrowed down first or all values are sorted; ties, heavy tails."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, generator=g, dtype=torch.float64)
    few = torch.randint(1, 5, (20_000,), generator=g).double()
    some = torch.rand(20_000, generator=g) < 0.4
    for values in (normal.square(), (3 * normal).exp(), few, torch.full_like(few, 2.0)):
        for droppable in (None, some):
            how = {"least": least, "strict": least, "droppable": droppable}
            chosen = torch.rand(20_000, generator=g) < 0.9
            whole = trust.within_moment(values, chosen, budget, **how)
            monkeypatch.setattr(trust, "_FEW", 50)
            narrowed = trust.within_moment(values, chosen, budget, **how)
            monkeypatch.undo()
            assert torch.equal(whole, narrowed)
            left = values[chosen & whole]
            ok = len(left) == 0 or float(left.mean()) <= budget * (1 + 1e-12)
            assert (
                ok or least or (droppable is not None and not bool((whole & chosen & some & (values > budget)).any()))
            )


@pytest.mark.parametrize("q", [0.0, 0.3, 0.75, 1.0])
def test_quantile_is_the_linear_one(q):
    for n in (1, 2, 5, 40):
        x = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        assert float(trust.quantile(x, q)) == pytest.approx(float(torch.quantile(x, q)))


# -- where the anchor was lost ---------------------------------------------------------------------------------------

SENSITIVE = ["tis", "mis", "icepop", "kpop", "dppo", "dppo_kl", "trm", "m2po", "m2po-code", "m2po-areal", "rejection"]


@pytest.mark.parametrize("name", SENSITIVE)
def test_a_batch_without_any_distance_is_warned_about_once(name):
    rollouts, policy = example()
    blind = rollouts.replace(logp_old=policy.logp, logp_sampler=policy.logp)
    a = kenpo.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kenpo.evaluate(a, rollouts, policy)
    with pytest.warns(NoDivergenceWarning, match=f"^{name}: .*exactly 0"):
        kenpo.evaluate(a, blind, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kenpo.evaluate(a, blind, policy)


@pytest.mark.parametrize("name", ["grpo", "gspo", "mini_rl", "opsm", "stapo", "gmc_grpo"])
def test_no_warning_where_no_distance_is_the_usual_thing(name):
    rollouts, policy = example()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kenpo.evaluate(kenpo.get(name), rollouts.replace(logp_old=policy.logp, logp_sampler=policy.logp), policy)


def test_masked_batches_are_not_blind():
    rollouts, policy = example()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kenpo.evaluate(kenpo.get("tis"), rollouts.replace(mask=torch.zeros_like(rollouts.mask)), policy)


def test_every_field_of_every_weight_is_shown():
    for name in kenpo.names():
        for stage in kenpo.get(name).weights:
            assert {f.name for f in dataclasses.fields(stage)} <= {k.split(".")[-1] for k in kenpo.get(name).settings()}
    assert kenpo.get("m2po-code").surrogate == MomentClip(budget=0.04)


def test_long_responses_ask_for_the_average_criterion():
    n = 4200
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[:, 0] = False
    zero = torch.zeros(2, n)
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.zeros(2).long(), rewards=torch.tensor([1.0, 0.0]), logp_sampler=zero
    )
    policy = kenpo.Policy(logp=zero - 0.01)
    with pytest.warns(LongResponseWarning, match="mean"):
        kenpo.evaluate(kenpo.get("trm"), rollouts, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kenpo.evaluate(kenpo.get("trm-both"), rollouts, policy)


@pytest.mark.parametrize("seed", [22, 212])
def test_the_token_at_the_released_codes_bound_is_inside(seed):
    """The range ends at a token's own ratio, which exp may round to either side of it, by its place in memory."""
    a = kenpo.get("m2po-code")
    rollouts, policy = tensors(make_case(seed, gap="extreme" if seed == 212 else "usual", no_verdict=seed % 7 == 0))
    plain = kenpo.evaluate(a, rollouts, policy)
    for k in range(6):
        order = shuffled(len(rollouts), k)
        moved = kenpo.evaluate(a, widened(rollouts, k)[order], widened(policy, k)[order])
        assert same(moved.coefficients[:, : rollouts.mask.shape[1]], plain.coefficients[order])


@pytest.mark.parametrize("name", ["grpo", "gspo", "dppo", "kpop", "m2po"])
def test_recorded_log_probs_are_constants(name):
    """Whoever made them: a graph that hangs on them adds nothing, not even where they are the policy's own tensor."""
    a = kenpo.get(name).but(regularizers=())
    rollouts, policy = tensors(make_case(3))
    logp = policy.logp.nan_to_num(0.0, 0.0, 0.0).requires_grad_()
    live = rollouts.replace(logp_old=logp, logp_sampler=logp * 1.0)
    still = rollouts.replace(logp_old=logp.detach(), logp_sampler=logp.detach())
    found, right = (kenpo.evaluate(a, r, policy.replace(logp=logp)) for r in (live, still))
    assert torch.equal(found.coefficients, right.coefficients)
    found.loss.backward()
    assert torch.equal(logp.grad, right.coefficients)


def test_divergence_scaled_to_its_threshold():
    """Beyond the trust region outward tokens weigh threshold/D; within it, or coming back, 1: never 0."""
    rollouts, policy = tensors(make_case(7, gap="usual", empty_rows=False))
    a = kenpo.get("dppo")
    masked_out = kenpo.evaluate(a, rollouts, policy).weights
    scaled = kenpo.evaluate(a.with_settings({"weights.divergence_mask.beyond": "scale"}), rollouts, policy).weights
    d = (rollouts.logp_sampler.exp() - policy.logp.exp()).abs()
    gone = rollouts.mask & (masked_out == 0)
    assert bool(gone.any())
    assert torch.allclose(scaled[gone], 0.15 / d[gone], rtol=1e-12)
    assert bool((scaled[rollouts.mask & (masked_out == 1)] == 1).all())
    with pytest.raises(InputError, match="threshold of 0"):
        a.with_settings({"weights.divergence_mask.beyond": "scale", "weights.divergence_mask.threshold": 0.0})


def test_the_ratios_own_effective_sample_size():
    rollouts, policy = tensors(make_case(3))
    found = kenpo.evaluate(kenpo.get("m2po"), rollouts, policy).metrics
    r = (policy.logp - rollouts.logp_sampler)[rollouts.mask].exp()
    assert found["ratio_squared"] == pytest.approx(float((r * r).mean()))
    assert found["ratio_effective_sample_size"] == pytest.approx(float(r.sum() ** 2 / (len(r) * (r * r).sum())))
