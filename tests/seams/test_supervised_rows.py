"""Rows without a reward (origin 4) beside sampled ones: in no statistic, read by one regularizer that names them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kenpo
from kenpo import stages as S
from kenpo.types import SUPERVISED

NAN = float("nan")


@dataclass(frozen=True)
class Imitation(S.Regularizer):
    """Cross-entropy on the supervised rows."""

    weight: float = 0.5
    supervised = True

    _needs = frozenset({"logp", "origin"})

    def rows(self, ctx):
        return ctx.trainable & ctx.supervised.unsqueeze(-1)

    def __call__(self, ctx):
        return -self.weight * ctx.over(self.rows(ctx)).logp

    @property
    def own_aggregate(self):
        return S.SequenceMean()


PLAIN = kenpo.get("dapo").but(name="plain")
MIXED = PLAIN.but(name="mixed", regularizers=(Imitation(),))


def batch(supervised: bool):
    rows = 6 if supervised else 4
    mask = torch.tensor([[0, 1, 1, 1]] * 4 + [[0, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    logp = -torch.arange(1, 25, dtype=torch.float64).reshape(6, 4) / 10
    fields = {
        "mask": mask,
        "group": torch.tensor([0, 0, 1, 1, 0, 2]),  # one of them even carries a group's number
        "rewards": torch.tensor([1.0, 0.0, 0.0, 2.0, NAN, 5.0], dtype=torch.float64),
        "logp_old": logp - 0.1,
        "origin": torch.tensor([0, 0, 0, 0, SUPERVISED, SUPERVISED]),
    }
    return kenpo.Rollouts(**fields)[:rows], kenpo.Policy(logp)[:rows]


def test_supervised_rows_are_selected_and_change_nothing_else():
    without, with_ = kenpo.evaluate(PLAIN, *batch(False)), kenpo.evaluate(PLAIN, *batch(True))
    prepared = kenpo.prepare(PLAIN, batch(True)[0])
    assert prepared.selected.tolist() == [True] * 6
    assert prepared.compared.tolist() == [True] * 4 + [False] * 2
    assert prepared.group_size.tolist()[:4] == [2.0] * 4
    assert torch.equal(with_.coefficients[:4], without.coefficients)
    assert not bool(with_.coefficients[4:].any())
    assert with_.loss.item() == pytest.approx(without.loss.item(), abs=1e-15)
    assert {k: v for k, v in with_.metrics.items() if v == v} == {k: v for k, v in without.metrics.items() if v == v}


def test_the_regularizer_that_names_them_reads_them():
    plain, mixed = kenpo.evaluate(PLAIN, *batch(True)), kenpo.evaluate(MIXED, *batch(True))
    extra = mixed.coefficients - plain.coefficients
    assert not bool(extra[:4].any())
    assert extra[4].tolist() == pytest.approx([0.0, -0.125, -0.125, 0.0])  # weight / (2 rows · 2 tokens)
    assert extra[5].tolist() == pytest.approx([0.0, *[-0.5 / 6] * 3])


def test_totals_count_them_for_that_regularizer_only():
    b = kenpo.weigh(MIXED, kenpo.prepare(MIXED, batch(True)[0]))
    assert (float(b.totals.sequences), float(b.totals.tokens), float(b.totals.groups)) == (4.0, 12.0, 2.0)
    own = b.extra[0][1]
    assert (float(own.sequences), float(own.tokens)) == (2.0, 5.0)


def test_microbatches_of_mixed_rows_add_up():
    rollouts, policy = batch(True)
    whole = kenpo.evaluate(MIXED, rollouts, policy)
    b = kenpo.weigh(MIXED, kenpo.prepare(MIXED, rollouts))
    parts = [kenpo.coefficients(MIXED, b[[i]], policy[[i]]) for i in range(6)]
    assert float(sum(loss.loss for loss, _ in parts)) == pytest.approx(whole.loss.item(), abs=1e-12)
    assert torch.allclose(torch.cat([g["logp"] for _, g in parts]), whole.coefficients, atol=1e-15, rtol=0)


def test_a_bad_log_prob_of_a_supervised_row_is_named():
    rollouts, policy = batch(True)
    logp = policy.logp.clone()
    logp[5, 2] = NAN
    with pytest.raises(kenpo.errors.NonFiniteError, match=r"\[5, 2\]"):
        kenpo.evaluate(MIXED, rollouts, kenpo.Policy(logp))


def test_ones_is_supervised_training():
    sft = kenpo.Algorithm("sft_here", "–", advantage=S.Ones(), surrogate=S.ScoreFunction(), aggregate=S.TokenMean())
    rollouts, policy = batch(False)
    result = kenpo.evaluate(sft, rollouts, policy)
    assert float(result.loss) == pytest.approx(-float(policy.logp[rollouts.mask].mean()))
    assert result.coefficients.tolist() == [[0.0, *[pytest.approx(-1 / 12)] * 3]] * 4
    assert kenpo.biased(sft, 5) is None
