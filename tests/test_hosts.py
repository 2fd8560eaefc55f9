"""The side that other trainers call: can they feed an algorithm, and batches from their own advantages and counts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from laws.build import same, tensors
from reference.cases import make_case

import kenpo
from kenpo import Scope
from kenpo import stages as S
from kenpo.errors import InputError, MissingFieldError, ScopeError, UnknownNameError
from kenpo.types import Totals

LOSS = {"logp", "logp_old"}
VERL = {"tokens", "sequences"}


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("gspo", {}, None),
        ("gspo", {"supplied": {"logp"}}, None),
        ("gspo", {"supplied": {"logp"}, "updates": 2}, "sequence_ratio reads 'logp_old', which is not supplied"),
        ("gspo", {"supplied": ()}, "sequence_ratio reads 'logp_old', which is not supplied"),
        ("rloo", {"supplied": ()}, "score_function reads 'logp', which is not supplied"),
        ("grpo", {}, "kl_to_reference reads 'logp_ref', which is not supplied"),
        ("gspo", {"counts": VERL}, None),
        ("gspo", {"counts": {"tokens"}}, "sequence_mean divides by the total 'sequences', which is not known"),
        ("dapo", {"counts": VERL, "advantages": True},
         "drop_uniform_groups drops rollouts, which the host's advantages and counts can't take back"),
        ("dapo", {"supplied": {*LOSS, "truncated"}}, None),
        ("m2po", {"supplied": {*LOSS, "logp_sampler"}, "scope": Scope.SEQUENCE},
         "second_moment must see the whole batch, the host shows a sequence"),
        ("m2po", {"supplied": {*LOSS, "logp_sampler"}}, None),
        ("zcpo", {"supplied": {*LOSS, "kl_ref"}, "scope": Scope.GROUP},
         "zero_sum_kl needs the policy's terms of the whole minibatch before advantages are known"),
        ("ggpo", {"supplied": {*LOSS, "logp_ref"}, "scope": Scope.SEQUENCE},
         "gibbs_gap must see the whole group, the host shows a sequence"),
        ("ggpo", {"supplied": {*LOSS, "logp_ref"}, "scope": Scope.GROUP}, None),
        ("ggpo", {"supplied": {*LOSS, "logp_ref"}, "counts": VERL},
         "contrast_mean divides by the total 'contrasts', which is not known"),
        ("online_icepop", {"supplied": {*LOSS, "logp_sampler"}, "updates": 2}, "at most 1 update"),
        ("erpo", {"supplied": {*LOSS, "logp_ref", "prompt_mask"}, "counts": VERL},
         "query_kl names rows of its own, whose counts are not known"),
    ],
)  # fmt: skip
def test_what_a_host_can_feed(name, how, reason):
    algorithm = kenpo.get(name).with_settings({"selection": []}) if name == "gspo" else kenpo.get(name)
    found = kenpo.feeds(algorithm, **({"supplied": LOSS} | how))
    assert (found is None) if reason is None else (reason in (found or "")), found


def test_own_advantages_need_no_fields_of_the_advantage():
    a = kenpo.get("reinforce_pp").with_settings({"advantage.beta": 0.1})
    assert "global_whiten" in kenpo.feeds(a, {"logp"}, counts=None)
    assert kenpo.feeds(a, LOSS, Scope.SEQUENCE, {"tokens", "sequences"}, advantages=True) is None


@pytest.mark.parametrize("name", ["gspo", "rloo", "dr_grpo", "cispo", "reinforce_pp", "tis", "sapo"])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_from_given_numbers_is_the_same_loss(name, seed):
    a = kenpo.get(name).but(selection=(), shaping=())
    if name == "dr_grpo":
        a = a.with_settings({"aggregate.length": 9})
    rollouts, policy = tensors(make_case(seed, fresh=False))
    prepared = kenpo.prepare(a, rollouts)
    whole = kenpo.evaluate(a, rollouts, policy)
    counts = kenpo.weigh(a, prepared).totals
    totals = {"tokens": counts.tokens, "sequences": float(counts.sequences)}
    found, loss = torch.zeros_like(whole.coefficients), 0.0
    for rows in ([0, 1, 2], list(range(3, len(rollouts)))):
        part = kenpo.given(a, rollouts[rows], prepared.advantages[rows], totals)
        share, gradients = kenpo.coefficients(a, part, policy[rows])
        loss, found[rows] = loss + share.loss, gradients["logp"]
    assert same(loss, whole.loss.detach())
    assert same(found, whole.coefficients)


@pytest.mark.parametrize("unknown", [{}, {"sequences": None}, {"sequences": math.nan}])
def test_an_unknown_total_is_refused_by_name_where_it_would_be_used(unknown):
    rollouts, _policy = tensors(make_case(1))
    advantages = torch.ones_like(rollouts.mask, dtype=torch.float64)
    totals = {"tokens": 7.0} | unknown
    with pytest.raises(MissingFieldError, match="sequence_mean divides by the total 'sequences'"):
        kenpo.given(kenpo.get("gspo"), rollouts, advantages, totals)
    kenpo.given(kenpo.get("cispo"), rollouts, advantages, totals)  # which counts tokens


def test_given_refuses_what_it_cannot_do():
    rollouts, _policy = tensors(make_case(1))
    advantages = torch.ones_like(rollouts.mask, dtype=torch.float64)
    everything = {f.name: 1.0 for f in dataclasses.fields(Totals)}
    with pytest.raises(ScopeError, match="m2po: second_moment must see the whole batch"):
        kenpo.given(kenpo.get("m2po"), rollouts, advantages, everything)
    with pytest.raises(ScopeError, match="gibbs_gap must see the whole group"):
        kenpo.given(kenpo.get("ggpo"), rollouts, advantages, everything)
    kenpo.given(kenpo.get("ggpo"), rollouts, advantages, everything, whole_groups=True)
    with pytest.raises(UnknownNameError, match="sequence"):
        kenpo.given(kenpo.get("gspo"), rollouts, advantages, {"sequence": 1.0})
    with pytest.raises(InputError, match="advantages have shape"):
        kenpo.given(kenpo.get("gspo"), rollouts, advantages[1:], everything)


def _aggregates():
    for cls in (S.TokenMean, S.SequenceMean, S.SequenceSum, S.GroupTokenMean):
        for over in ("all", "kept", *(["weight"] if cls is S.TokenMean else [])):
            yield cls(over=over)
    yield from (S.ContrastMean(), S.FixedLength(length=5), S.FixedLength(length=5, rows=False))


@pytest.mark.parametrize("aggregate", [*_aggregates()], ids=repr)
def test_aggregates_divide_by_the_totals_they_name_and_no_other(aggregate):
    mask = torch.tensor([[False, True, True], [False, True, False]])
    one, per_row = torch.tensor(2.0), torch.tensor([2.0, 3.0])
    for field in dataclasses.fields(Totals):
        counts = {f.name: per_row if f.name.startswith("group_") else one for f in dataclasses.fields(Totals)}
        counts[field.name] = counts[field.name] * math.nan
        found = aggregate(mask, mask, Totals(**counts))
        assert bool(found.isnan().any()) is (field.name in aggregate.totals), field.name


def test_batches_move_between_devices(monkeypatch):
    rollouts, policy = tensors(make_case(2, fresh=False))
    a = kenpo.get("tis")
    a = a.but(regularizers=(*a.regularizers, S.QueryKL()))
    rollouts = rollouts.replace(prompt_mask=rollouts.mask & False)
    prepared = kenpo.prepare(a, rollouts)
    batch = kenpo.weigh(a, prepared)
    back = kenpo.weigh(a, prepared.to("cpu")).to(torch.device("cpu"))
    assert torch.equal(kenpo.objective(a, back, policy).loss, kenpo.objective(a, batch, policy).loss)
    # The checks of Rollouts need numbers, which "meta" has none of: all but them must arrive there.
    monkeypatch.setattr(kenpo.Rollouts, "to", lambda self, device: self)
    moved, away = prepared.to("meta"), batch.to("meta")
    own, totals = away.extra[len(a.regularizers) - 1]
    found = [moved.advantages, moved.selected, moved.shaped, moved.group_size, away.advantages, away.weights, own]
    found += [away.prepared.advantages, *vars(away.totals).values(), *vars(totals).values()]
    assert {v.device.type for v in found} == {"meta"}
