"""Critics against their golden files: GAE, the value loss, PPO's and VAPO's terms, ReMax, RFPO, a KL in the reward."""

from __future__ import annotations

import pytest
import torch
from laws.build import same, tensors
from reference.cases import make_case
from reference.values import gae as reference_gae
from reference.values import ppo as reference_ppo

import kenpo
from golden.given import batch, tensor
from golden.test_files import cases, close
from kenpo.ops import groups, returns, verdict
from kenpo.stages import (
    GAE,
    Clip,
    CriticVerdict,
    EntropyBonus,
    GlobalWhiten,
    GreedyBaseline,
    KLToReference,
    PositiveNLL,
    SupervisedNLL,
    ValueLoss,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def evaluated(a, **fields):
    return kenpo.evaluate(a, *batch(**fields))


@pytest.mark.parametrize(("i", "e"), cases("gae"))
def test_gae(i, e):
    mask = torch.tensor(i["mask"]).bool()
    a = returns.gae(tensor(i["token_rewards"]), tensor(i["values"]), mask, gamma=i["gamma"], lam=i["lambda"])
    close(a, e["advantages"])
    close(torch.where(mask, a + tensor(i["values"]), 0.0), e["returns"])
    close(groups.whiten(a, mask), e["whitened"])


@pytest.mark.parametrize(("i", "e"), cases("vapo_gae"))
def test_length_adaptive_lambda(i, e):
    mask, r, v = torch.tensor(i["mask"]).bool(), tensor(i["token_rewards"]), tensor(i["values"])
    lam = returns.adaptive_lambda(mask.sum(-1).double(), i["alpha"])
    close(lam, e["policy_lambda"])
    close(returns.gae(r, v, mask, gamma=i["gamma"], lam=lam), e["advantages"])
    critic = returns.gae(r, v, mask, gamma=i["gamma"], lam=i["critic_lambda"])
    close(torch.where(mask, critic + v, 0.0), e["returns"])


@pytest.mark.parametrize(("i", "e"), cases("value_loss"))
def test_value_loss(i, e):
    mask, v = torch.tensor(i["mask"]).bool(), tensor(i["values"]).requires_grad_()
    error = returns.value_error(v, tensor(i["values_old"]), tensor(i["returns"]), i["value_clip"])
    loss = torch.where(mask, error, 0.0).sum() / mask.sum()
    close(loss.detach(), e["loss"])
    close(torch.autograd.grad(loss, v)[0], e["value_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("ppo"))
def test_ppo(i, e):
    a = kenpo.get("ppo").but(
        advantage=GAE(gamma=i["gamma"], lam=i["lambda"], kl=i["kl_coef"], whiten=i["whiten"]),
        surrogate=Clip(i["clip"], i["clip"]),
        regularizers=(ValueLoss(i["value_clip"], i["vf_coef"]), EntropyBonus(i["entropy_coef"])),
    )
    fields = {n: i[n] for n in ("mask", "logp", "logp_old", "logp_ref", "values_old", "values", "entropy")}
    rollouts, policy = batch(rewards=i["scores"], **fields)
    result = kenpo.evaluate(a, rollouts, policy)
    close(result.loss.detach(), e["loss"])
    close(result.advantages[:, 1:], e["whitened"] if i["whiten"] else e["advantages"])
    close(kenpo.prepare(a, rollouts).returns[:, 1:], e["returns"])
    close(result.coefficients[:, 1:], e["coefficients"])
    close(result.gradients["values"][:, 1:], e["value_gradient"])
    close(result.gradients["entropy"][:, 1:], e["entropy_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("vapo_nll"))
def test_likelihood_of_right_responses(i, e):
    a = kenpo.get("rloo").but(advantage=GreedyBaseline(), regularizers=(PositiveNLL(i["weight"]),))
    correct = [float(c) for c in i["correct"]]
    result = evaluated(a, rewards=correct, baseline=correct, mask=i["mask"], logp=i["logp"])  # advantages are 0
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("remax"))
def test_remax(i, e):
    a = kenpo.get("remax").but(advantage=GreedyBaseline(kl=i["kl_coef"]))
    fields = {n: i[n] for n in ("mask", "logp", "logp_old", "logp_ref") if n in i}
    result = evaluated(a, rewards=i["scores"], baseline=i["greedy_scores"], **fields)
    close(result.advantages[:, 1:], e["advantages"])
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("rfpo"))
def test_rfpo(i, e):
    offset, v = tensor(i["length_offset"]), tensor(i["final_value"]) - tensor(i["length_offset"])
    assert len(offset) == len(v)
    fields = {n: i[n] for n in ("mask", "logp", "logp_old")}
    stage = CriticVerdict(tau=i["tau"], binarise=i["binarise"])
    rollouts, policy = batch(rewards=[float(x) for x in i["label"]], values_old=i["values"], **fields)
    a = kenpo.get("rfpo").but(shaping=(stage,), surrogate=Clip(i["clip"], i["clip"]))
    judged = kenpo.prepare(a, rollouts.replace(score_old=v)).shaped
    kept = torch.where(torch.tensor(i["use_label"]), rollouts.rewards, judged)
    close(kept, e["rewards"])
    result = kenpo.evaluate(a.but(shaping=()), rollouts.replace(rewards=kept), policy)
    raw = kenpo.prepare(a.but(shaping=(), advantage=GAE(lam=1.0, whiten=False)), rollouts.replace(rewards=kept))
    close(raw.advantages[:, 1:], e["advantages_raw"])
    close(result.advantages[:, 1:], e["advantages"])
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


@pytest.mark.parametrize(("i", "e"), cases("rfpo_calibration"))
def test_a_frozen_critic_is_calibrated(i, e):
    v, n = tensor(i["values"]), tensor(i["lengths"])
    found = verdict.calibrate(v, n, torch.tensor(i["correct"]), i["bins"])
    close(found.edges, e["edges"])
    close(found.offsets, e["offsets"])
    close(v - verdict.length_offset(n, found.edges, found.offsets), e["adjusted"])
    close(found.tau, e["tau"])
    new, long = tensor(i["new_values"]), tensor(i["new_lengths"])
    close(verdict.length_offset(long, found.edges, found.offsets), e["new_offsets"])
    stage = CriticVerdict(found.tau, tuple(found.edges.tolist()), tuple(found.offsets.tolist()))
    mask = torch.arange(1, int(long.max()) + 2) <= long.unsqueeze(-1)
    rollouts, _ = batch(rewards=[0.0] * len(new), mask=mask.int().tolist(), score_old=new, logp=torch.zeros(mask.shape))
    a = kenpo.get("rloo").but(shaping=(stage,))
    close(kenpo.prepare(a, rollouts).shaped, e["new_rewards"])


@pytest.mark.parametrize(("i", "e"), cases("reinforce_pp_kl"))
def test_kl_of_reinforce_pp(i, e):
    inside = i["variant"] == "kl_in_reward"
    advantage = GlobalWhiten(beta=i["kl_coef"]) if inside else GlobalWhiten(baseline="group")
    beside = () if inside else (KLToReference(i["kl_coef"], i["variant"][-2:]),)
    a = kenpo.get("reinforce_pp").but(advantage=advantage, regularizers=beside, surrogate=Clip(i["clip"], i["clip"]))
    fields = {n: i[n] for n in ("mask", "logp", "logp_old", "logp_ref")}
    result = evaluated(a, rewards=i["rewards"], group=i.get("group", list(range(len(i["rewards"])))), **fields)
    close(result.advantages[:, 1:], e["advantages"])
    close(result.loss.detach(), e["loss"])
    close(result.coefficients[:, 1:], e["coefficients"])


# -- beyond the files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["ppo", "vapo"])
def test_values_and_their_slopes_on_random_batches(name, estimator):
    """The fifth item of the references, discounted, with a KL in the reward and cut responses that go on."""
    for seed in range(6):
        case = make_case(seed, critic=True)
        rows = len(case["rollouts"]["group"])
        case["rollouts"]["truncated"] = [b % 2 for b in range(rows)]
        own = kenpo.get(name).advantage
        given = {"gamma": 0.9, "kl": 0.05, "estimator": estimator, "terminal": "truncated"}
        a = kenpo.get(name).with_settings({f"advantage.{n}": v for n, v in given.items()})
        numbers = {"alpha": own.adaptive, "critic_lam": own.critic_lam, "nll": 0.1 if name == "vapo" else 0.0}
        high = 0.28 if name == "vapo" else 0.2
        loss, c, advantages, _, slopes = reference_ppo(
            case, gamma=0.9, kl_coef=0.05, estimator=estimator, high=high, **numbers,
            terminal=lambda y: y.of_row("score_old") * y.of_row("truncated"),
        )  # fmt: skip
        result = kenpo.evaluate(a, *tensors(case))
        close(result.loss.detach(), loss)
        assert torch.allclose(result.coefficients, tensor(c), rtol=1e-9, atol=1e-12)
        assert torch.allclose(result.advantages, tensor(advantages), rtol=1e-9, atol=1e-12)
        assert torch.allclose(result.gradients["values"], tensor(slopes["values"]), rtol=1e-9, atol=1e-12)


def test_a_critic_alone_gets_the_value_loss_and_its_gradient_is_the_same_in_any_cut():
    for name in ("ppo", "vapo", "ppo-ptx"):
        a = kenpo.get(name)
        rollouts, policy = tensors(make_case(5, critic=True, supervised=True))
        whole = kenpo.evaluate(a, rollouts, policy)
        batched = kenpo.weigh(a, kenpo.prepare(a, rollouts))
        both, alone = torch.zeros_like(policy.values), torch.zeros_like(policy.values)
        for rows in torch.arange(len(rollouts)).split(2):
            both[rows] = kenpo.coefficients(a, batched[rows], policy[rows])[1]["values"]
            critic = kenpo.Policy(values=policy.values[rows])
            _, found = kenpo.coefficients(a, batched[rows], critic, of={"values"})
            alone[rows] = found["values"]
            _, found = kenpo.coefficients(a, batched[rows], policy[rows], of={"logp"})
            assert set(found) == {"logp"}
            assert same(found["logp"], whole.coefficients[rows], 1e-12)
        assert same(both, whole.gradients["values"], 1e-12)
        assert same(alone, whole.gradients["values"], 1e-12)


def test_tool_tokens_are_stepped_over():
    """A masked token between two others changes nothing, whatever value and reward stand there."""
    r, v = [0.5, 0.0, 1.0], [0.3, 0.6, -0.2]
    want = reference_gae(r, v, 0.9, 0.8)
    junk = [0.5, 99.0, 0.0, 1.0], [0.3, -7.0, 0.6, -0.2]
    mask = torch.tensor([[True, False, True, True]])
    got = returns.gae(tensor([junk[0]]), tensor([junk[1]]), mask, gamma=0.9, lam=0.8)
    close(got[0, mask[0]], want)


def test_a_kl_in_reward_and_loss_is_refused_unless_meant():
    for name in ("ppo", "reinforce_pp-kl"):
        with pytest.raises(kenpo.errors.IllegalCombinationError, match="counted twice"):
            kenpo.get(name).adding("kl_to_reference")
        meant = kenpo.get(name).with_settings({"advantage.both": True}).adding("kl_to_reference")
        assert "logp_ref" in meant.needs
    kenpo.get("ppo").with_settings({"advantage.kl": 0.0}).adding("kl_to_reference")
    with pytest.raises(kenpo.errors.IllegalCombinationError, match="counted twice"):
        kenpo.get("remax").with_settings({"advantage.kl": 0.1}).adding("kl_to_reference")


def test_a_discount_reaches_outcomes_without_a_kl():
    mask = [[1, 0, 1, 1]]
    a = kenpo.get("remax").with_settings({"advantage.gamma": 0.5})
    result = evaluated(a, rewards=[4.0], baseline=[0.0], mask=mask, logp=[[-1.0] * 4])
    close(result.advantages[:, 1:], [[1.0, 0.0, 2.0, 4.0]])
    white = kenpo.get("reinforce_pp").with_settings({"advantage.gamma": 0.5, "advantage.eps": 0.0})
    result = evaluated(white, rewards=[4.0], mask=mask, logp=[[-1.0] * 4], logp_old=[[-1.0] * 4])
    raw = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    close(result.advantages[0, [1, 3, 4]], ((raw - raw.mean()) / raw.std()).tolist())


def test_labels_are_drawn_alike_wherever_a_row_stands():
    case = make_case(7, critic=True, topk=2)
    rollouts, _ = tensors(case)
    a = kenpo.get("rfpo").with_settings({"shaping.critic_verdict.labels": 0.5})
    plain = kenpo.prepare(a, rollouts).shaped
    order = torch.arange(len(rollouts)).flip(0)
    assert torch.equal(kenpo.prepare(a, rollouts[order]).shaped, plain[order])
    judged = kenpo.prepare(kenpo.get("rfpo"), rollouts).shaped
    assert 0 < int((plain != judged).sum()) < len(rollouts)
    everyone = kenpo.prepare(a.with_settings({"shaping.critic_verdict.labels": 1.0}), rollouts).shaped
    assert torch.equal(everyone, rollouts.rewards)


def test_given_rows_are_imitated_and_enter_nothing_else():
    """`SupervisedNLL`: −coef/n on each token of the row without a reward; no one else's coefficient moves."""
    for seed in range(4):
        rollouts, policy = tensors(make_case(seed, critic=True, supervised=True, empty_rows=False))
        plain, mixed = (kenpo.evaluate(kenpo.get(n), rollouts, policy) for n in ("ppo", "ppo-ptx"))
        given = rollouts.mask & rollouts.supervised.unsqueeze(-1)
        assert torch.equal(mixed.coefficients[~given], plain.coefficients[~given])
        assert not bool(plain.coefficients[given].any() | mixed.gradients["values"][given].any())
        coef = torch.full((int(given.sum()),), -SupervisedNLL().coef / int(given.sum()), dtype=torch.float64)
        assert torch.allclose(mixed.coefficients[given], coef, rtol=1e-12)
