"""Decisions from a menu of labels: the ratio over one menu, entropies, and the identity of text and action scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden.given import Given, batch, tensor

import kenpo
from kenpo.errors import InputError
from kenpo.ops import decisions
from kenpo.stages import Clip

HERE = Path(__file__).parents[1] / "golden"


def cases(name):
    return [
        pytest.param(c["inputs"], c["expect"], id=c["name"]) for c in json.loads((HERE / f"{name}.json").read_text())
    ]


def close(got, want, atol=1e-12):
    got = torch.as_tensor(got, dtype=torch.float64)
    assert torch.allclose(got.detach(), tensor(want), rtol=1e-9, atol=atol), (got, want)


@pytest.mark.parametrize(("i", "e"), cases("rlid_ppo"))
def test_one_ratio_per_decision(i, e):
    menu, action = torch.tensor(i["menu"]).bool(), torch.tensor(i["action"])[:, None]
    z = tensor(i["label_logits"]).requires_grad_()
    logp = decisions.menu_log_softmax(z, menu).gather(1, action)
    old = decisions.menu_log_softmax(tensor(i["label_logits_old"]), menu).gather(1, action)
    close(logp.squeeze(1), e["logp"])
    close(old.squeeze(1), e["logp_old"])
    support = torch.where(menu, torch.arange(menu.shape[1]), -1)[:, None]
    rollouts, policy = batch(i["advantages"], mask=[[1]] * len(menu), logp=logp.detach(), logp_old=old, tokens=action,
                             support_ids=support)  # fmt: skip
    a = kenpo.get("rlid").but(advantage=Given(), surrogate=Clip(i["clip"], i["clip"]))
    result = kenpo.evaluate(a, rollouts, policy)
    close((logp - old).exp().squeeze(1), e["ratio"])
    close(result.loss, e["loss"])
    close(result.coefficients[:, 1], e["coefficients"])
    close(torch.autograd.grad((logp * result.coefficients[:, 1:]).sum(), z)[0], e["logits_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("rlid_entropy"))
def test_the_label_marginal_is_not_the_row_entropy(i, e):
    menu, prior = torch.tensor(i["menu"]).bool(), tensor(i["prior"])
    z = tensor(i["label_logits"]).requires_grad_()
    rows, marginal = decisions.row_entropy(z, menu), decisions.label_marginal(z, menu)
    kl = decisions.marginal_kl(marginal, prior)
    close(rows, e["row_entropy"])
    close(rows.mean(), e["mean_row_entropy"])
    close(marginal, e["label_marginal"])
    close(decisions.marginal_entropy(marginal), e["marginal_entropy"])
    close(kl, e["marginal_kl"])
    close(decisions.marginal_entropy(marginal) - rows.mean(), e["mutual_information"])
    close(torch.autograd.grad(kl, z, retain_graph=True)[0], e["marginal_kl_gradient"])
    close(torch.autograd.grad(rows.mean(), z)[0], e["mean_row_entropy_gradient"])


@pytest.mark.parametrize(("i", "e"), cases("rlid_identity"))
def test_the_actions_score_keeps_the_mean_and_takes_off_the_variance_within(i, e):
    """Every text enumerated: E[A ∇log μ(text)] = E[A ∇log π(action)], and the covariances differ by
    E[A² Cov(∇log μ | action)], to 1e-12."""
    flat = [*i["root_logits"], *(x for child in i["child_logits"] for x in child)]
    parameters = tensor(flat).requires_grad_()
    root, at, texts, actions = len(i["root_logits"]), len(i["root_logits"]), [], []
    first = parameters[:root].log_softmax(0)
    for k, child in enumerate(i["child_logits"]):
        rest = parameters[at : at + len(child)].log_softmax(0)
        at += len(child)
        named = i["action_of"][k]
        texts += [first[k] + x for x in rest] if child else [first[k]]
        actions += named if child else [named] if isinstance(named, int) else named
    text_logp, action_of = torch.stack(texts), torch.tensor(actions)
    logp = decisions.action_logp(text_logp, action_of, len(i["advantages"]))

    def scores(x):
        return torch.stack([torch.autograd.grad(v, parameters, retain_graph=True)[0] for v in x])

    chance, a = text_logp.detach().exp(), tensor(i["advantages"])
    text_score, action_score = scores(text_logp), scores(logp)
    close(chance, e["text_probabilities"])
    close(logp.exp(), e["action_probabilities"])
    close(action_score, e["action_scores"])
    by_text = a[action_of, None] * text_score
    by_action = a[action_of, None] * action_score[action_of]

    def moments(x):
        mean = chance @ x
        return mean, (x - mean).T @ (chance[:, None] * (x - mean))

    (mean_text, cov_text), (mean_action, cov_action) = moments(by_text), moments(by_action)
    assert float((mean_text - mean_action).abs().max()) < 1e-12
    within = a[action_of, None] * (text_score - action_score[action_of])
    gap = within.T @ (chance[:, None] * within)
    assert float((cov_text - cov_action - gap).abs().max()) < 1e-12
    assert float(gap.trace()) >= -1e-15
    for name, x in (("text_gradient", mean_text), ("action_gradient", mean_action), ("text_covariance", cov_text),
                    ("action_covariance", cov_action), ("gap", gap), ("gap_trace", gap.trace())):  # fmt: skip
        close(x, e[name])


def test_what_is_no_decision_is_refused():
    fields = {"logp": [[-1.0, -1.0]] * 2, "logp_old": [[-1.0, -1.0]] * 2, "tokens": [[3, 5]] * 2}
    menu = [[[3, 5], [3, 5]]] * 2
    a = kenpo.get("rlid")
    rollouts, policy = batch([1.0, 0.0], mask=[[1, 0], [1, 1]], support_ids=menu, **fields)
    with pytest.raises(InputError, match="response 1 has more than one"):
        kenpo.evaluate(a, rollouts, policy)
    rollouts, policy = batch([1.0, 0.0], mask=[[1, 0], [1, 0]], support_ids=[[[3, -1]] * 2, [[5, -1]] * 2], **fields)
    with pytest.raises(InputError, match="response 1 is not on its menu"):
        kenpo.evaluate(a, rollouts, policy)
    with pytest.raises(InputError, match="decision 1 has no legal action"):
        decisions.menu_log_softmax(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))
