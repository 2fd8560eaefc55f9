"""Decisions read from a menu: a softmax over the labels of the legal actions at one position.

Axes: B decisions, L labels, Y texts. A row's menu is a bool [B,L]; every menu holds an action.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops.masked import divide, select


def menu_log_softmax(logits: Tensor, menu: Tensor) -> Tensor:
    """[B,L] log-probs over each row's menu; 0 (with no gradient) at labels outside it.

    >>> menu_log_softmax(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[True, False, True]])).exp()
    tensor([[0.5000, 1.0000, 0.5000]])
    """
    if not bool(menu.any(-1).all()):
        raise InputError(f"menu: decision {int((~menu.any(-1)).nonzero()[0])} has no legal action")
    return select(logits.masked_fill(~menu, -torch.inf).log_softmax(-1), menu)


def row_entropy(logits: Tensor, menu: Tensor) -> Tensor:
    """[B] entropy of each decision over its menu, in nats."""
    logp = menu_log_softmax(logits, menu)
    return -select(logp.exp() * logp, menu).sum(-1)


def label_marginal(logits: Tensor, menu: Tensor) -> Tensor:
    """[L] the mean over decisions of π(label), 0 where it is not on the menu: how often each label is chosen."""
    chance = select(menu_log_softmax(logits, menu).exp(), menu)
    return divide(chance.sum(0), chance.new_tensor(float(len(chance))))


def marginal_entropy(marginal: Tensor) -> Tensor:
    """0-d entropy of a label marginal [L]. Minus the mean row entropy it is the information that the state carries
    about the choice: a policy may be sure in every row and still choose every label, or always choose the first."""
    return -torch.special.xlogy(marginal, marginal).sum()


def marginal_kl(marginal: Tensor, prior: Tensor) -> Tensor:
    """0-d KL(marginal‖prior) of labels [L]: what a calibration that permutes labels should bring to 0."""
    return torch.special.xlogy(marginal, marginal).sum() - torch.special.xlogy(marginal, prior).sum()


def action_logp(text_logp: Tensor, action: Tensor, actions: int) -> Tensor:
    """[Y] log-probs of whole texts and the action that each stands for -> [actions] log π(a) = log Σ_y μ(y).

    ``E[∇log μ(y) | a] = ∇log π(a)``: with an advantage of the action alone, the action's score in place of the text's
    keeps the mean of a policy gradient and takes ``E[A²·Cov(∇log μ | a)]`` off its covariance (Rao and Blackwell). It
    says nothing of a separately parametrised label model. −inf for an action without a text.
    """
    rows = torch.arange(actions, device=action.device)[:, None] == action
    return text_logp.expand(actions, -1).masked_fill(~rows, -torch.inf).logsumexp(-1)
