"""Laws the references keep on random batches: slopes against differences, junk, padding, order, extremes, on-policy."""

from __future__ import annotations

import copy
import math
import random

import pytest

from reference import REFERENCES, WIDER
from reference.cases import cases, make_case, on_policy

OPTIONS = {"dppo_topk": {"topk": 3}, "rspo": {"router": (2, 2)}, "rspo-pre-clip": {"router": (2, 2)},
           "rspo-post-clip": {"router": (2, 2)}}  # fmt: skip
NUMBERS = {"dr_grpo": {"length": 7}, "dapo": {"limit": 6, "buffer": 3}}
OPTIONS |= {"sis": {"topk": 3}, "luffy": {"experts": True}, "grin": {"experts": True}, "erpo": {"query": True},
            "ppo": {"critic": True}, "vapo": {"critic": True}}  # fmt: skip
NUMBERS |= {"range_grpo": {"length": 7}, "erpo": {"average_surprisal": 3.0}}  # fmt: skip
ANSWERED = ("gapo", "mad_rl", "mad_rl-l2", "mad_rl-forward-kl", "mad_rl-jsd", "ttrl", "ttpo")
OPTIONS |= {n: {"answers": True} for n in ANSWERED} | {n: {"experts": True} for n in ("gkd-mixed", "sft_mixture")}
OPTIONS |= {"spo": {"answers": True, "binary": True}, "rfpo": {"critic": True, "binary": True},
            "ppo-ptx": {"critic": True, "supervised": True}, "rlid": {"decisions": True}}  # fmt: skip
OPTIONS |= {"gprl": {"parts": True}, "rlcr": {"parts": True, "binary": True}}
ALL = REFERENCES | {
    n: f for n, f in WIDER.items() if n not in ("graft_with_sources", "sis")
}  # those take lists beside the case
NAMES = sorted(ALL)
# A weight that reads pi_theta is a constant under the gradient, so differences of the value don't give the slope.
DETACHED = {"cispo", "m2po-code", "minpro", "minpro-inclusive", "mini_rl", "gspo_token", "dhpo", "gppo", "pmpo"}
DETACHED |= {
    "gmc_grpo",
    "reco",
    "dhpo-entropy",
    "gppo-dual",
    "mini_rl-old",
    "cispo-floor",
    "cispo-mask",
    "cispo-band",
    "cispo-dynamic",
}
DETACHED |= {"ttpo", "minillm", "opd-prime", "sdpo", "sdpo-sampled", "teacher_mixed-losses"}
# A critic, a baseline of another kind, a KL, a teacher, an expert or a vote teaches without any difference of rewards.
TAUGHT = {"erpo", "grin", "ppo", "ppo-ptx", "vapo", "rfpo", "remax", "reinforce_pp-kl", "spo", "sft", "sft_mixture"}
TAUGHT |= {n for n in NAMES if n in ANSWERED or n.partition("-")[0] in ("gkd", "minillm", "opd", "opsa", "sdpo")}
TAUGHT |= {n for n in NAMES if n.partition("-")[0] in ("opsd", "teacher_mixed")}
TAUGHT |= {"rlcr", "gprl"}  # a confidence or another axis teaches where the outcomes are equal
PAIRWISE = {n for n in NAMES if n.partition("-")[0] in ("reward_model", "dpo", "ipo", "simpo", "mdre")}


def reference(name, case, **more):
    return ALL[name](case, **(NUMBERS.get(name, {}) | more))[:4]


def nudged(case, b, t, h):
    case = copy.deepcopy(case)
    case["policy"]["logp"][b][t] += h
    return case


@pytest.mark.parametrize("name", [n for n in NAMES if n not in DETACHED])
def test_slopes_agree_with_differences(name):
    case = make_case(3, **OPTIONS.get(name, {}))
    _, coefficients, _, _ = reference(name, case)
    for b, row in enumerate(case["rollouts"]["mask"]):
        for t, m in enumerate(row):
            if m and (b + t) % 3 == 0:
                h = 1e-6
                up, down = (reference(name, nudged(case, b, t, s))[0] for s in (h, -h))
                assert math.isclose(coefficients[b][t], (up - down) / (2 * h), rel_tol=2e-5, abs_tol=2e-8), (b, t)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", ["none", "usual", "extreme"])
def test_finite_and_blind_to_masked_positions(name, gap):
    for case in cases(3, 10, gap=gap, no_verdict=True, **OPTIONS.get(name, {})):
        loss, coefficients, advantages, weights = reference(name, case)
        assert math.isfinite(loss)
        for field in (coefficients, advantages, weights):
            for row, mask in zip(field, case["rollouts"]["mask"], strict=True):
                assert all(math.isfinite(x) for x in row)
                if name != "erpo":  # that one trains on prompt tokens
                    assert all(x == 0 for x, m in zip(row, mask, strict=True) if not m)


@pytest.mark.parametrize("name", NAMES)
def test_order_of_rows_changes_nothing(name):
    case = make_case(5, **OPTIONS.get(name, {}))
    order = random.Random(0).sample(range(len(case["rollouts"]["mask"])), len(case["rollouts"]["mask"]))
    taken = lambda v: {n: taken(x) for n, x in v.items()} if isinstance(v, dict) else [v[k] for k in order]  # noqa: E731
    moved = {part: taken(case[part]) for part in case}
    a, b = reference(name, case), reference(name, moved)
    assert math.isclose(a[0], b[0], rel_tol=1e-12, abs_tol=1e-14)
    for k, j in enumerate(order):
        assert all(math.isclose(x, y, rel_tol=1e-12, abs_tol=1e-14) for x, y in zip(b[1][k], a[1][j], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_without_old_log_probs_the_policy_is_its_own(name):
    case = make_case(6, **OPTIONS.get(name, {}))
    fresh = copy.deepcopy(case)
    del fresh["rollouts"]["logp_old"]
    case["rollouts"]["logp_old"] = case["policy"]["logp"]
    assert reference(name, fresh) == reference(name, case)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TAUGHT])
def test_nothing_to_learn_from(name):
    for options in ({"rewards": [1.0]}, {"mask": 0}):
        case = make_case(7, **OPTIONS.get(name, {}))
        B = len(case["rollouts"]["mask"])
        if "rewards" in options:
            case["rollouts"]["rewards"] = [0.1] * B
        else:
            case["rollouts"]["mask"] = [[0] * len(row) for row in case["rollouts"]["mask"]]
        more = {"beta": 0.0} if name in ("grpo", "repo") else {}
        if name == "dapo" and "rewards" in options:
            more["limit"] = None
        loss, coefficients, advantages, _ = reference(name, case, **more)
        assert loss == 0.0
        fields = (coefficients,) if name in PAIRWISE else (coefficients, advantages)  # pairs have the advantage 1
        assert all(x == 0.0 for field in fields for row in field for x in row)


SEQUENCE_MEANS = ["grpo", "gspo", "gspo_token", "gmpo", "pmpo", "sapo", "sspo", "dhpo", "icepop", "kpop"]
TOKEN_MEANS = ["dapo", "cispo", "m2po", "minpro", "gppo", "ripo", "tis", "mis"]


@pytest.mark.parametrize("names", [SEQUENCE_MEANS, TOKEN_MEANS], ids=["sequence mean", "token mean"])
def test_on_policy_the_gradients_coincide(names):
    case = on_policy(make_case(8, uniform_group=False, single_group=False))
    want = reference("grpo", case, beta=0.0)[1] if names is SEQUENCE_MEANS else REFERENCES["cispo"](case)[1]
    for name in names:
        got = REFERENCES[name](case, **({"beta": 0.0} if name == "grpo" else {}))[1]
        for row, expected in zip(got, want, strict=True):
            assert all(math.isclose(x, y, rel_tol=1e-12, abs_tol=1e-15) for x, y in zip(row, expected, strict=True))


def test_luspo_is_length_times_gspo_and_gspo_is_gspo_token():
    case = make_case(9)
    wide = {"low": 0.1, "high": 0.3}
    gspo, token, luspo = (REFERENCES[n](case, **wide)[1] for n in ("gspo", "gspo_token", "luspo"))
    for mask, g, t, lu in zip(case["rollouts"]["mask"], gspo, token, luspo, strict=True):
        assert all(math.isclose(a, b, abs_tol=1e-15, rel_tol=1e-12) for a, b in zip(g, t, strict=True))
        assert all(math.isclose(sum(mask) * a, b, abs_tol=1e-15, rel_tol=1e-12) for a, b in zip(g, lu, strict=True))


def test_limits_of_the_mixtures():
    case = make_case(11)
    pairs = [("dhpo", {"weight": 1.0}, "grpo", {"beta": 0.0}), ("dhpo", {"weight": 0.0}, "gspo", {}),
             ("pmpo", {"p": 1e-9}, "gmpo", {})]  # fmt: skip
    for name, numbers, other, theirs in pairs:
        a, b = REFERENCES[name](case, **numbers), REFERENCES[other](case, **theirs)
        assert math.isclose(a[0], b[0], rel_tol=1e-7)
        for x, y in zip(a[1], b[1], strict=True):
            assert all(math.isclose(p, q, rel_tol=1e-6, abs_tol=1e-9) for p, q in zip(x, y, strict=True))
