"""Preferences: known numbers, groups of any size, cuts, far log-ratios, ties, and what differs between the methods."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from golden.given import batch, tensor
from laws.build import same, shuffled, tensors
from reference.cases import make_case

import kenpo
from kenpo.errors import InputError
from kenpo.ops import pairs
from kenpo.stages import PairLogistic, PairSquared, TurnDensityRatio

HERE = Path(__file__).parents[1] / "golden"
NAMES = ("reward_model", "dpo", "dpo-conservative", "dpo-robust", "ipo", "ipo-normalised", "simpo", "mdre")


def cases(name):
    return [
        pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in json.loads((HERE / f"{name}.json").read_text())
    ]


def close(got, want, rtol=1e-9):
    assert torch.allclose(torch.as_tensor(got, dtype=torch.float64), tensor(want), rtol=rtol, atol=1e-12), (got, want)


def two_by_two(i, **more):
    """Chosen and rejected rows as groups of two, rejected first in every other pair: rewards decide, not order."""
    n = len(i["chosen_logp"])
    order = [(b, side) for b in range(n) for side in (("chosen", "rejected"), ("rejected", "chosen"))[b % 2]]
    wide = max(len(row) for side in ("chosen", "rejected") for row in i[f"{side}_mask"])
    padded = lambda row, junk: row + [junk] * (wide - len(row))  # noqa: E731
    fields = {k: [padded(i[f"{side}_{k}"][b], 7) for b, side in order] for k in more.pop("fields")}
    mask = [padded(i[f"{side}_mask"][b], 0) for b, side in order]
    rewards = [1.0 if side == "chosen" else -0.5 for _, side in order]
    places = {side: [k for k, (_, s) in enumerate(order) if s == side] for side in ("chosen", "rejected")}
    return batch(rewards, [b for b, _ in order], mask, **fields), places


def checked(a, i, e, fields):
    (rollouts, policy), places = two_by_two(i, fields=fields)
    result = kenpo.evaluate(a, rollouts, policy)
    close(result.loss.detach(), e["loss"])
    for side in ("chosen", "rejected"):
        want = tensor(e[f"{side}_coefficients"])
        got = result.coefficients[places[side], 1 : 1 + want.shape[1]]
        assert bool(((got - want).abs() <= 1e-9 * want.abs() + 1e-300).all()), side  # far ones are tiny, not 0


def dpo_of(i):
    beta = i["beta"]
    if i["variant"].startswith("ipo"):
        return kenpo.get("ipo").but(surrogate=PairSquared(beta, normalise=i["variant"].endswith("normalised")))
    return kenpo.get("dpo").but(surrogate=PairLogistic(beta=beta, loss=i["variant"], smoothing=i["label_smoothing"]))


@pytest.mark.parametrize(("i", "e"), cases("dpo") + cases("dpo_far"))
def test_dpo(i, e):
    checked(dpo_of(i), i, e, ("logp", "logp_ref"))


@pytest.mark.parametrize(("i", "e"), cases("simpo"))
def test_simpo(i, e):
    numbers = {k: i[k] for k in ("gamma", "gamma_beta_ratio") if k in i}
    a = kenpo.get("simpo").but(surrogate=PairLogistic(beta=i["beta"], reference=False, normalise=True, **numbers))
    checked(a, i, e, ("logp",))


@pytest.mark.parametrize(("i", "e"), cases("mdre"))
def test_mdre(i, e):
    stage = TurnDensityRatio(i["omega_low"], i["omega_high"], i["pivot"], i["variant"])
    checked(kenpo.get("mdre").but(surrogate=stage), i, e, ("logp", "logp_ref", "turn"))


@pytest.mark.parametrize(("i", "e"), cases("reward_model"))
def test_reward_model(i, e):
    """A prompt's pairs as one group are pairs of unlike rows there; as groups of two with one weight each where the
    mean is over pairs. For the mean over prompts a pair counts 1/(pairs of its prompt)."""
    n = len(i["chosen"])
    groups = [k for k in range(n) for _ in (0, 1)]
    score = [x for pair in zip(i["chosen"], i["rejected"], strict=True) for x in pair]
    margin = [x for m in i["margin"] or [0.0] * n for x in (m, 7.0)]
    rollouts, policy = batch([1.0, 0.0] * n, groups, logp=[[0.0]] * (2 * n), score=score, margin=margin)
    stage = PairLogistic(on="score", beta=1.0, margin=i["margin"] is not None, centring=i.get("centering", 0.0))
    a = kenpo.get("reward_model").but(surrogate=stage)
    if i["variant"] == "prompt_mean":
        share = [1 / (i["prompt"].count(p) * len(set(i["prompt"]))) for p in i["prompt"]]
        loss, slope = 0.0, torch.zeros(2 * n, dtype=torch.float64)
        for k in range(n):
            rows = [2 * k, 2 * k + 1]
            part = kenpo.evaluate(a, rollouts[rows], policy[rows])
            loss, slope[rows] = loss + share[k] * part.loss.detach(), share[k] * part.gradients["score"]
    else:
        part = kenpo.evaluate(a, rollouts, policy)
        loss, slope = part.loss.detach(), part.gradients["score"]
    close(loss, e["loss"])
    close(slope[0::2], e["chosen_gradient"])
    close(slope[1::2], e["rejected_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("pair_groups"))
def test_groups_of_any_size(i, e):
    margin = {} if i["margin"] is None else {"margin": i["margin"]}
    if i["variant"].startswith("bradley"):
        rollouts, policy = batch(i["rewards"], i["group"], logp=[[0.0]] * len(i["group"]), score=i["scores"], **margin)
        stage = PairLogistic(on="score", beta=1.0, margin=bool(margin), centring=i["centering"])
        a = kenpo.get("reward_model").but(surrogate=stage)
    else:
        rollouts, policy = batch(i["rewards"], i["group"], i["mask"], logp=i["logp"], logp_ref=i["logp_ref"], **margin)
        a = kenpo.get("dpo").but(surrogate=PairLogistic(beta=i["beta"], margin=bool(margin)))
    result = kenpo.evaluate(a, rollouts, policy)
    prepared = kenpo.prepare(a, rollouts)
    assert int(kenpo.weigh(a, prepared).totals.contrasts) == e["decided_groups"]
    better, worse = pairs.decided_pairs(rollouts.rewards, rollouts.group, torch.ones(len(rollouts), dtype=torch.bool))
    assert sorted(zip(better.tolist(), worse.tolist(), strict=True)) == sorted(
        (i, j) for group in e["pairs"] for i, j in group
    )
    close(result.loss.detach(), e["loss"])
    if "score_gradient" in e:
        close(result.gradients["score"], e["score_gradient"])
    else:
        close(result.coefficients[:, 1:], e["coefficients"])


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_of_whole_groups_in_one_phase(name):
    """In any order of rows: shares of whole groups add up, a split group is refused, two phases give the same."""
    for seed in range(4):
        rollouts, policy = tensors(make_case(seed))
        order = shuffled(len(rollouts), seed)
        rollouts, policy = rollouts[order], policy[order]
        a = kenpo.get(name)
        field = "score" if name == "reward_model" else "logp"
        whole = kenpo.evaluate(a, rollouts, policy)
        assert a.two_phase(whole_groups=True) is None
        b = kenpo.weigh(a, kenpo.prepare(a, rollouts))
        loss, slope = 0.0, torch.zeros_like(whole.gradients[field])
        for g in rollouts.group.unique():
            rows = (rollouts.group == g).nonzero().flatten()
            share, gradients = kenpo.coefficients(a, b[rows], policy[rows])
            loss, slope[rows] = loss + share.loss, gradients[field]
        assert same(loss, whole.loss.detach())
        assert same(slope, whole.gradients[field])
        split = (rollouts.group == rollouts.group.mode().values).nonzero().flatten()[:1]
        with pytest.raises(kenpo.errors.ScopeError):
            kenpo.coefficients(a, b[split], policy[split])
        two = kenpo.coefficients(a, kenpo.weigh(a, kenpo.prepare(a, rollouts), policy), policy)[1][field]
        assert same(two, slope)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_rewards_say_which_is_chosen(name):
    """Exchanging the rewards of a pair exchanges the roles; equal rewards teach nothing; a third, tied row leaves."""
    rollouts, policy = tensors(make_case(5, groups=1, single_group=False, uniform_group=False, empty_rows=False))
    rows = [0, 1]
    rollouts, policy = rollouts[rows].replace(group=torch.tensor([3, 3])), policy[rows]
    a, field = kenpo.get(name), "score" if name == "reward_model" else "logp"

    def slopes(rewards):
        given = rollouts.replace(rewards=torch.tensor(rewards, dtype=torch.float64))
        return kenpo.evaluate(a, given, policy).gradients[field]

    up, down = slopes([1.0, 0.0]), slopes([0.0, 1.0])
    assert float(up[0].sum()) < 0 < float(up[1].sum())
    assert float(down[1].sum()) < 0 < float(down[0].sum())
    assert not bool(slopes([0.5, 0.5]).any())


def log_sigmoid(z):
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def far_loss(name, h):
    """The loss of one pair at log-ratio margin h, one token a side."""
    right, wrong = -log_sigmoid(0.1 * h), -log_sigmoid(-0.1 * h)
    return {
        "dpo": right,
        "dpo-conservative": 0.9 * right + 0.1 * wrong,
        "dpo-robust": (0.9 * right - 0.1 * wrong) / 0.8,
        "ipo": (h - 5) ** 2,
        "simpo": -log_sigmoid(2 * h - 0.5),
    }[name]


@pytest.mark.parametrize("name", ["dpo", "dpo-conservative", "dpo-robust", "ipo", "simpo"])
@pytest.mark.parametrize("far", [200.0, -200.0])
def test_far_log_ratios_neither_saturate_nor_overflow(name, far):
    """Each side's sum ±200 off: the loss grows as its formula says, in float32 too."""
    for dtype in (torch.float64, torch.float32):
        logp = torch.tensor([[0.0, far - 300], [0.0, -far - 300]], dtype=dtype)
        rollouts = kenpo.Rollouts(
            mask=torch.tensor([[False, True]] * 2), group=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0]),
            logp_ref=torch.tensor([[0.0, -300.0]] * 2, dtype=dtype),
        )  # fmt: skip
        result = kenpo.evaluate(kenpo.get(name), rollouts, kenpo.Policy(logp=logp))
        assert bool(torch.isfinite(result.coefficients).all())
        want = far_loss(name, 2 * far)
        assert math.isclose(
            float(result.loss.detach()), want, rel_tol=1e-6 if dtype == torch.float32 else 1e-12, abs_tol=1e-300
        )


def test_an_empty_side_takes_no_part():
    """Named rule: a response without a trainable token is in no pair, and its group decides nothing without it."""
    rollouts, policy = batch([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [[1, 1], [0, 0], [1, 1], [1, 0]],
                             logp=[[-1.0, -2.0]] * 4, logp_ref=[[-1.5, -1.5]] * 4)  # fmt: skip
    a = kenpo.get("dpo")
    result = kenpo.evaluate(a, rollouts, policy)
    assert int(kenpo.weigh(a, kenpo.prepare(a, rollouts)).totals.contrasts) == 1
    assert not bool(result.coefficients[:2].any())
    alone = kenpo.evaluate(a, rollouts[[2, 3]], policy[[2, 3]])
    assert same(result.loss.detach(), alone.loss.detach())


def test_both_parametrisations_of_the_target_margin():
    rollouts, policy = tensors(make_case(1))
    inside = PairLogistic(beta=2.5, reference=False, normalise=True, gamma_beta_ratio=0.55)
    outside = PairLogistic(beta=2.5, reference=False, normalise=True, gamma=2.5 * 0.55)
    got = [kenpo.evaluate(kenpo.get("simpo").but(surrogate=s), rollouts, policy) for s in (inside, outside)]
    assert same(got[0].coefficients, got[1].coefficients)


def test_what_differs_is_said_exactly():
    assert kenpo.get("dpo").diff(kenpo.get("simpo")) == {
        "surrogate.beta": (0.1, 2.0),
        "surrogate.reference": (True, False),
        "surrogate.normalise": (False, True),
        "surrogate.gamma_beta_ratio": (0.0, 0.25),
    }
    assert kenpo.get("dpo").needs == {"logp", "logp_ref"}
    assert kenpo.get("simpo").needs == {"logp"}
    assert kenpo.get("reward_model").needs == {"score"}
    assert kenpo.get("reward_model").reaches == {"score"}


@pytest.mark.parametrize(
    "numbers",
    [
        {"beta": 0.0},
        {"smoothing": 0.1},
        {"loss": "robust", "smoothing": 0.5},
        {"gamma": 1.0, "gamma_beta_ratio": 0.5},
        {"centring": 0.1},
        {"on": "score", "normalise": True},
        {"on": "score", "reference": False},
    ],
)
def test_numbers_without_effect_are_refused(numbers):
    with pytest.raises(InputError, match="pair_logistic"):
        PairLogistic(**numbers)


def test_figures_of_pairs():
    score, everyone = tensor([2.0, 1.0, 3.0, 0.0, 5.0]), torch.ones(5, dtype=torch.bool)
    found = pairs.preference_figures(score, tensor([1.0, 0.0, 0.5, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]), everyone)
    (right, n), (margin, _) = found["pair_accuracy"], found["pair_margin"]
    assert (float(n), float(right)) == (1.0, 2 / 3)  # 0>1 right, 2>1 right, 0>2 wrong; group 1 is tied
    assert math.isclose(float(margin), (1.0 + 2.0 - 1.0) / 3)
