"""Trackers, votes, frequencies and target distributions against their golden files, and over several batches."""

from __future__ import annotations

import math

import pytest
import torch
from laws.build import tensors
from reference.cases import make_case
from reference.outcomes import forgetting, spo_step

import kenpo
from golden.given import batch, tensor
from golden.test_files import cases, close
from kenpo.ops import risk, signals, tracker
from kenpo.stages import (
    AgreementSplit,
    AgreementSwitch,
    BetaTracker,
    Calibration,
    FrequencyAware,
    GroupRobust,
    GroupZScore,
    LeaveOneOut,
    MajorityVote,
    QuantileRisk,
    SequenceMean,
    ShortestOfEach,
    TargetDistribution,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def shaped(stage, answers, group=None, **fields):
    """The rewards that a shaping makes of one-token responses with these answers."""
    n = len(answers)
    rollouts, _ = batch(group=group, answer=answers, logp=[[0.0]] * n, logp_old=[[0.0]] * n, **fields)
    return kenpo.prepare(kenpo.get("grpo").but(shaping=(stage,), regularizers=()), rollouts)


def identities(answers):
    """Whole numbers for answers, in the order in which they are first seen; −1 for none."""
    seen = {a: k for k, a in enumerate(dict.fromkeys(x for x in answers if x is not None))}
    return [-1 if a is None else seen[a] for a in answers]


@pytest.mark.parametrize(("i", "e"), cases("spo_tracker"))
def test_spo(i, e):
    ema = i["variant"] == "ema"
    stage = BetaTracker(
        forgetting=i["forgetting"], half_life=i["half_life"], rho_min=i["rho_min"], rho_max=i["rho_max"],
        form="ema" if ema else "beta",
    )  # fmt: skip
    start = e["trackers_start"]
    state = {
        "prompt": torch.tensor([int(p[1:]) for p in start]),
        "pair": torch.tensor(list(start.values()), dtype=torch.float64),
    }
    if not ema:
        offline = {int(p[1:]): (v["successes"], v["samples"]) for p, v in i["offline"].items()}
        made = stage.start(offline, smoothed=i["variant"] != "unsmoothed")
        assert made["prompt"].tolist() == [int(p[1:]) for p in i["offline"]]
        close(made["pair"], [start[p] for p in i["offline"]])
        state = made
    a = kenpo.get("spo").but(advantage=stage)
    for rows, want in zip(i["steps"], e["steps"], strict=True):
        if not ema and "sampling_weights_before" in want:
            got = stage.priorities(state)
            for prompt, weight in want["sampling_weights_before"].items():
                assert math.isclose(got[int(prompt[1:])], weight, rel_tol=1e-9)
        n = len(rows)
        rollouts, _ = batch(
            rewards=[r["reward"] for r in rows], group=list(range(n)), logp=[[0.0]] * n,
            prompt_id=[int(r["prompt"][1:]) for r in rows], drift=[r["drift"] for r in rows],
        )  # fmt: skip
        prepared = kenpo.prepare(a, rollouts, state)
        close(prepared.advantages[:, 1], want["advantages"])
        state = prepared.state
        after = dict(zip(state["prompt"].tolist(), state["pair"].tolist(), strict=True))
        for prompt, pair in want["trackers_after"].items():
            close(after[int(prompt[1:])], pair)


def test_a_tracker_over_several_batches():
    """Random batches in a row against the reference; a first visit starts at one half, and order does not matter where
    no prompt occurs twice."""
    a, state, trackers = kenpo.get("spo"), None, {}
    for seed in range(5):
        case = make_case(seed, answers=True, binary=True, no_verdict=seed == 2)
        prompts = [seed % 2 * 100 + k for k in range(len(case["rollouts"]["group"]))]
        case["rollouts"]["prompt_id"] = prompts
        judged = [b for b, r in enumerate(case["rollouts"]["rewards"]) if not math.isnan(r)]
        drift = case["rollouts"]["drift"]
        rows = [{"prompt": prompts[b], "reward": case["rollouts"]["rewards"][b], "drift": drift[b]} for b in judged]
        known = {row["prompt"]: trackers.get(row["prompt"], (0.5, 0.5)) for row in rows}
        rho = lambda row: 0.96 if math.isnan(row["drift"]) else forgetting(row["drift"])  # noqa: E731
        want = spo_step(trackers | known, rows, rho)
        rollouts, _ = tensors(case)
        prepared = kenpo.prepare(a, rollouts, state)
        got = torch.where(rollouts.mask, prepared.advantages, 0.0)
        for b, value in zip(judged, want["advantages"], strict=True):
            close(got[b][rollouts.mask[b]], [value] * int(rollouts.mask[b].sum()))
        order = torch.arange(len(rollouts)).flip(0)
        other = kenpo.prepare(a, rollouts[order], state).state
        state, trackers = prepared.state, want["trackers_after"]
        as_dict = [dict(zip(s["prompt"].tolist(), s["pair"].tolist(), strict=True)) for s in (state, other)]
        assert as_dict[0] == as_dict[1]
        assert as_dict[0].keys() == trackers.keys()
        for prompt, pair in trackers.items():
            close(as_dict[0][prompt], list(pair))


def test_a_tracker_is_bounded_and_refuses_what_it_cannot_count():
    stage = BetaTracker(forgetting="constant", capacity=2)
    a = kenpo.get("spo").but(advantage=stage)
    fields = {"logp": [[0.0]] * 3, "group": [0, 1, 2]}
    rollouts, _ = batch(rewards=[1.0, 0.0, 1.0], prompt_id=[5, 6, 7], **fields)
    assert kenpo.prepare(a, rollouts).state["prompt"].tolist() == [6, 7]
    rollouts, _ = batch(rewards=[1.0, 1.5, 0.0], prompt_id=[5, 6, 7], **fields)
    with pytest.raises(kenpo.errors.InputError, match=r"rollout 1 has reward 1\.5"):
        kenpo.prepare(a, rollouts)
    ema = kenpo.prepare(a.but(advantage=BetaTracker(forgetting="constant", form="ema")), rollouts).state
    assert ema["prompt"].tolist() == [5, 6, 7]
    then, now = torch.tensor([[0.0, -1.0, -2.0], [0.0, 0.0, 0.0]]), torch.tensor([[9.0, -1.5, -1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True], [False, False, False]])
    drift = tracker.log_prob_drift(then, now, mask)
    assert float(drift[0]) == 0.75
    assert math.isnan(float(drift[1]))


@pytest.mark.parametrize(("i", "e"), cases("gapo"))
def test_gapo(i, e):
    plain = (lambda x: x.strip().lower()) if i["variant"] == "normalised" else (lambda x: x)
    valid = list(dict.fromkeys(map(plain, i["valid_set"])))
    ids = identities([*valid, *map(plain, i["outputs"])])
    targets = [ids[: len(valid)]] * len(i["outputs"])
    prepared = shaped(FrequencyAware(), ids[len(valid) :], i["group"], target_ids=targets)
    close(prepared.shaped, e["rewards"])
    for ddof, name in ((0, "advantages_population"), (1, "advantages_sample")):
        a = kenpo.get("gapo").but(advantage=GroupZScore(eps=1e-4, ddof=ddof), regularizers=())
        close(kenpo.prepare(a, prepared.rollouts).advantages[:, 1], e[name])


@pytest.mark.parametrize(("i", "e"), cases("madrl"))
def test_mad_rl(i, e):
    names, n = list(i["target"]), len(i["categories"])
    answers = [-1 if c is None else names.index(c) for c in i["categories"]]
    stage = TargetDistribution(i["variant"], i["floor"], i["invalid_reward"])
    fields = {"target_ids": [list(range(len(names)))] * n, "target_prob": [list(i["target"].values())] * n}
    close(shaped(stage, answers, **fields).shaped, e["rewards"])


@pytest.mark.parametrize(("i", "e"), cases("ttrl"))
@pytest.mark.parametrize("ties", ["first", "smallest"])  # identities are numbered as they are seen
def test_ttrl(i, e, ties):
    for answers, label, votes, rewards in zip(i["answers"], e["labels"], e["votes"], e["rewards"], strict=True):
        ids = torch.tensor(identities(answers))
        voting = torch.arange(len(ids)) < i["voters"]
        found, count = signals.majority(ids, torch.zeros_like(ids), voting, ties)
        assert int(count[0]) == votes
        assert (label is None and int(found[0]) == -1) or answers[ids.tolist().index(int(found[0]))] == label
        if i["voters"] == len(ids):
            close(shaped(MajorityVote(ties), ids.tolist()).shaped[: i["trained"]], rewards)


def test_unparsable_answers_have_no_vote():
    assert shaped(MajorityVote(), [-1, -1, -1, 4, 4, 9]).shaped.tolist() == [0, 0, 0, 1, 1, 0]
    assert shaped(MajorityVote(), [-1, -1]).shaped.tolist() == [0, 0]
    assert shaped(MajorityVote("none"), [4, 9, -1]).shaped.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("i", "e"), cases("group_robust"))
def test_robust_scale(i, e):
    group, rewards = torch.tensor(i["group"]), tensor(i["rewards"])
    everyone = torch.ones_like(group).bool()
    close(signals.group_median(rewards, group, everyone), e["median"])
    close(signals.robust_score(rewards, group, everyone, i["eps"]), e["advantages"])
    close(judged(GroupRobust(i["eps"]), i).advantages[:, 1], e["advantages"])


def judged(advantage, i, state=None):
    """One-token responses with the case's rewards and groups under this advantage."""
    rollouts, _ = batch(rewards=i["rewards"], group=i["group"], logp_sampler=[[0.0]] * len(i["rewards"]))
    return kenpo.prepare(kenpo.get("rloo").but(advantage=advantage), rollouts, state)


@pytest.mark.parametrize(("i", "e"), cases("leave_one_out_normalised"))
def test_leave_one_out_over_the_others_deviation(i, e):
    got = judged(LeaveOneOut(normalised=True, eps=i["eps"]), i).advantages[:, 1]
    close(got, e["advantages"])


@pytest.mark.parametrize(("i", "e"), cases("rlcr"))
def test_rlcr(i, e):
    n = len(i["correct"])
    rollouts, _ = batch(rewards=[float(c) for c in i["correct"]], logp=[[0.0]] * n)
    parts = {"confidence": tensor(i["confidence"]), "format": tensor(i["format_reward"])}
    a = kenpo.get("rlcr").but(shaping=(Calibration(format_weight=1.0),))
    close(kenpo.prepare(a, rollouts.replace(reward_parts=parts)).shaped, e["rewards"])


def test_a_confidence_that_is_none():
    rollouts, _ = batch(rewards=[1.0, 1.0, 0.0, 1.0], logp=[[0.0]] * 4)
    with pytest.raises(kenpo.errors.MissingFieldError, match="'confidence'"):
        kenpo.prepare(kenpo.get("rlcr"), rollouts)
    rollouts = rollouts.replace(reward_parts={"confidence": tensor([math.nan, 1.01, -0.01, 1.0])})
    close(kenpo.prepare(kenpo.get("rlcr"), rollouts).shaped, [-1.0, -1.0, -1.0, 1.0])
    with pytest.raises(kenpo.errors.InputError, match="rollout 1 has reward 2"):
        kenpo.prepare(kenpo.get("rlcr"), rollouts.replace(rewards=tensor([1.0, 2.0, 0.0, 1.0])))


@pytest.mark.parametrize(("i", "e"), cases("riskpo"))
def test_risk(i, e):
    scores, (low, high) = tensor(i["scores"]), tensor(i["quantiles"])
    z = scores.sum(-1)
    close(z, e["bundle_scores"])
    if i["variant"] == "paper":
        a = risk.risk_utility(z, low, high, i["omega"])
    else:
        a = risk.risk_utility_released(
            z, low, high, alpha=i["alpha"], beta=i["beta"], mix=i["mix"], baseline=i["natural_baseline"]
        )
        a = a / (z.std() + 1e-6) if i["divide_by_std"] else a
    close(a, e["advantages"])
    close(risk.sum_mean_credit(a, scores, scores - scores.mean(0)), e["sum_mean_credit"])
    bundles, questions = scores.shape
    case = {"rewards": scores.T.flatten().tolist(), "group": [q for q in range(questions) for _ in range(bundles)]}
    how = {"bundle": questions, "pairing": "stored", "alpha": i["alpha"], "beta": i["beta"]}
    if i["variant"] == "paper":
        how |= {"omega": i["omega"]}
    else:
        how |= {"form": "masses", "mix": i["mix"], "baseline": i["natural_baseline"], "divide": i["divide_by_std"]}
    for credit, want in (("uniform", [[x] * questions for x in e["advantages"]]), ("sum_mean", e["sum_mean_credit"])):
        got = judged(QuantileRisk(**how, credit=credit), case, {"quantiles": tensor(i["quantiles"])})
        close(got.advantages[:, 1].reshape(questions, bundles).T, want)


@pytest.mark.parametrize(("i", "e"), cases("riskpo_tracker"))
def test_tracked_quantiles(i, e):
    q = tensor(i["quantiles"])
    for scores, want in zip(i["batches"], e["quantiles_after"], strict=True):
        q = risk.quantile_step(q, tensor(i["levels"]), tensor(scores), i["lr"])
        close(q, want)
    stage = QuantileRisk(bundle=1, alpha=i["levels"][0], beta=i["levels"][1], lr=i["lr"])
    state = {"quantiles": tensor(i["quantiles"])}
    for scores, want in zip(i["batches"], e["quantiles_after"], strict=True):
        state = judged(stage, {"rewards": scores, "group": [0] * len(scores)}, state).state
        close(state["quantiles"], want)


def test_quantiles_are_read_before_they_move():
    """A batch is judged by what the last one left: the same batch twice gives other advantages the second time."""
    case = {"rewards": [0.0, 1.0, 2.0, 3.0], "group": [0, 0, 0, 0]}
    stage = QuantileRisk(bundle=1, lr=1.0)
    first = judged(stage, case)
    close(first.state["quantiles"], [0.6 + 0.2 - 0.25, 2.4 + 0.8 - 0.75])
    second = judged(stage, case, first.state)
    qa, qb = first.state["quantiles"].tolist()
    close(second.advantages[:, 1], [-1.5 * qa + qa - qb, 1 - qb, 2 - qb, 0.0])


def test_which_responses_meet_does_not_depend_on_the_order_of_rows():
    rollouts, _ = batch(
        rewards=[float(k) for k in range(12)], group=[k % 3 for k in range(12)],
        logp_sampler=[[-0.1 * k - 0.013 * k * k] for k in range(12)],
    )  # fmt: skip
    a = kenpo.get("riskpo").but(advantage=QuantileRisk(bundle=3))
    plain = kenpo.prepare(a, rollouts).advantages[:, 1]
    order = torch.tensor([5, 0, 11, 3, 7, 1, 10, 2, 9, 4, 8, 6])
    close(kenpo.prepare(a, rollouts[order]).advantages[:, 1], plain[order].tolist())
    stored = kenpo.prepare(kenpo.get("riskpo").but(advantage=QuantileRisk(bundle=3, pairing="stored")), rollouts)
    assert not torch.allclose(stored.advantages[:, 1], plain)
    stage = a.advantage
    ctx = kenpo.stages.Context(rollouts, torch.ones(12, dtype=torch.bool))
    members = stage._bundles(ctx.of("QuantileRisk", stage.needs))
    met = [sorted(rollouts.group[members == m].tolist()) for m in members.unique()]
    assert met == [[0, 1, 2]] * 4  # one response of each question


@pytest.mark.parametrize(("i", "e"), cases("riskpo_k_level"))
def test_quantile_mixture(i, e):
    close(risk.quantile_mixture(tensor(i["scores"]), tensor(i["levels"]), tensor(i["weights"])), e["figure"])


def ttpo_of(i):
    """The algorithm with the case's numbers."""
    split = AgreementSplit(i["lambda"], {"population": 0, "sample": 1}[i["std"]], i["eps"])
    few = ShortestOfEach(i["train_positive"], i["train_negative"], i["gradient_tokens"], i["denominator"] == "each")
    switch = AgreementSwitch(tokens=i["gradient_tokens"])
    return kenpo.get("ttpo").but(advantage=split, weights=(few,), surrogate=switch, aggregate=SequenceMean("kept"))


@pytest.mark.parametrize(("i", "e"), cases("ttpo"))
def test_ttpo(i, e):
    n, ahead = len(i["answers"]), lambda x: torch.cat([torch.zeros_like(x[:, :1]), x], 1)  # nothing trains at place 0
    if i["variant"] == "logits":
        z = tensor(i["logits"]).requires_grad_()
        student, teacher = z.log_softmax(-1), tensor(i["teacher_logits"]).log_softmax(-1)
        taken = torch.tensor(i["tokens"]).clamp(min=0).unsqueeze(-1)
        fields = {"logp": student.gather(-1, taken).squeeze(-1), "entropy": -(student.exp() * student).sum(-1)}
        fields["kl_teacher"] = (teacher.exp() * (teacher - student)).sum(-1)
    else:
        fields = {"logp": tensor(i["logp"]), "entropy": tensor(i["entropy"]), "kl_teacher": tensor(i["divergence"])}
    mask = ahead(torch.tensor(i["mask"]).bool())
    rollouts = kenpo.Rollouts(
        mask=mask, group=torch.tensor(i["group"]), rewards=torch.zeros(n, dtype=torch.float64),
        answer=torch.tensor(identities(i["answers"])), logp_sampler=torch.zeros(mask.shape, dtype=torch.float64),
    )  # fmt: skip
    result = kenpo.evaluate(ttpo_of(i), rollouts, kenpo.Policy(**{k: ahead(x.detach()) for k, x in fields.items()}))
    close(result.loss.detach(), e["loss"])
    close(kenpo.prepare(ttpo_of(i), rollouts).shaped, e["rewards"])
    A = [1.0 if r else i["lambda"] * a for r, a in zip(e["rewards"], e["advantages"], strict=True)]
    close(result.advantages[mask], [a for a, row in zip(A, i["mask"], strict=True) for m in row if m])
    trained = (result.weights > 0).any(-1).nonzero().flatten().tolist()
    assert trained == sorted(e["positive"] + e["negative"])
    up = {k: result.gradients[k][:, 1:] for k in ("logp", "kl_teacher")}
    if i["variant"] == "terms":
        close(up["logp"], e["coefficients"])
        close(up["kl_teacher"], e["divergence_gradient"])
        return
    whole = (up["logp"] * fields["logp"] + up["kl_teacher"] * fields["kl_teacher"])[mask[:, 1:]].sum()
    close(torch.autograd.grad(whole, z)[0], e["logits_gradient"])


def test_one_answer_and_no_answer():
    """A group of one answer imitates throughout; one without an answer does not train; of equal lengths a hash decides,
    whatever the order of rows."""
    n = 7
    group = [0, 0, 0, 1, 1, 1, 1]
    rollouts, policy = batch(
        group=group, answer=[5, 5, 5, -1, -1, -1, -1], logp_sampler=[[-0.1 * k * k] * 2 for k in range(n)],
        logp=[[-1.0, -2.0]] * n, entropy=[[0.1, 0.4]] * n, kl_teacher=[[0.3, 0.7]] * n,
    )  # fmt: skip
    a = kenpo.get("ttpo").but(weights=(ShortestOfEach(2, 2),))
    result = kenpo.evaluate(a, rollouts, policy)
    assert result.advantages[:3, 1:].tolist() == [[1.0, 1.0]] * 3
    trained = result.weights.any(-1)
    assert int(trained[:3].sum()) == 2
    assert not bool(trained[3:].any())
    assert not bool(result.coefficients.any())
    close(result.loss.detach(), 0.7 / 2)  # H and D scaled are (0, 1): the second token alone, a mean over two tokens
    order = torch.tensor([2, 5, 0, 1, 6, 3, 4])
    moved = kenpo.evaluate(a, rollouts[order], policy[order])
    assert torch.equal(moved.weights, result.weights[order])
    none = kenpo.evaluate(kenpo.get("ttpo").but(weights=(ShortestOfEach(0, 2),)), rollouts, policy)
    assert not bool(none.weights.any())
