"""A surrogate that couples a group, in one phase: microbatches hold whole groups, the denominator is global."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from laws.build import same, tensors
from reference.cases import make_case

import kenpo
from kenpo import stages as S
from kenpo.errors import ScopeError
from kenpo.ops import groups, masked


@dataclass(frozen=True)
class Pull(S.Surrogate):
    """−½ (a response's summed log-prob − its group's mean)², on groups that decide something: couples a group."""

    takes_ratio = False
    any_samples = True
    _scope = S.Scope.GROUP
    _needs = frozenset({"logp"})

    def __call__(self, ratio, ctx):
        total = masked.row_sum(ctx.logp, ctx.mask)
        value = groups.centred(total, ctx.group, ctx.selected)
        return masked.select(-0.5 * value * value, self.decided(ctx)).unsqueeze(-1).expand_as(ctx.logp)


COUPLED = kenpo.Algorithm("coupled", "–", advantage=S.Ones(), surrogate=Pull(), aggregate=S.ContrastMean())
ALL = [COUPLED, kenpo.get("conspo"), kenpo.get("ggpo"), kenpo.get("gmc_grpo")]
IDS = [a.name for a in ALL]


def by_group(rollouts, together):
    """Rows of each microbatch: `together` groups at a time."""
    names = rollouts.group.unique().tolist()
    packs = [names[i : i + together] for i in range(0, len(names), together)]
    return [torch.isin(rollouts.group, torch.tensor(p)).nonzero().squeeze(1).tolist() for p in packs]


@pytest.mark.parametrize("a", ALL, ids=IDS)
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_one_phase_equals_the_whole_minibatch(a, together, seed):
    rollouts, policy = tensors(make_case(seed, fresh=False))
    whole = kenpo.evaluate(a, rollouts, policy)
    batch = kenpo.weigh(a, kenpo.prepare(a, rollouts))
    loss, found = torch.zeros((), dtype=torch.float64), torch.zeros_like(whole.coefficients)
    for rows in by_group(rollouts, together):
        share, gradients = kenpo.coefficients(a, batch[rows], policy[rows])
        loss, found[rows] = loss + share.loss, gradients["logp"]
    assert same(loss, whole.loss.detach())
    assert same(found, whole.coefficients)


@pytest.mark.parametrize("a", ALL, ids=IDS)
def test_the_trainer_is_told(a):
    assert a.two_phase(whole_groups=True) is None
    assert "group" in a.whole_groups()
    assert a.two_phase() == a.whole_groups()  # where a group does not fit: two phases


@pytest.mark.parametrize("name", ["m2po", "zcpo", "stapo", "grpo", "gspo"])
def test_whole_groups_are_no_help_to_wider_stages_and_no_need_of_narrow_ones(name):
    assert kenpo.get(name).whole_groups() is None
    wide = name in ("m2po", "zcpo", "stapo")
    assert (kenpo.get(name).two_phase(whole_groups=True) is not None) is wide


@pytest.mark.parametrize("a", ALL, ids=IDS)
def test_a_split_group_is_refused(a):
    rollouts, policy = tensors(make_case(5, fresh=False))
    batch = kenpo.weigh(a, kenpo.prepare(a, rollouts))
    group = rollouts.group[rollouts.group == rollouts.group.mode().values].numel()
    assert group > 1
    rows = (rollouts.group == rollouts.group.mode().values).nonzero().squeeze(1).tolist()[1:]
    assert not bool(batch[rows].whole_groups.any())
    with pytest.raises(ScopeError, match="microbatch splits one"):
        kenpo.objective(a, batch[rows], policy[rows])


def test_the_denominator_counts_decided_groups():
    mask = torch.tensor([[0, 1, 1]] * 6 + [[0, 0, 0]], dtype=torch.bool)
    rollouts = kenpo.Rollouts(
        mask=mask,
        group=torch.tensor([0, 0, 1, 1, 2, 3, 3]),  # decided; a tie; alone; decided by an empty response only
        rewards=torch.tensor([1.0, 0.0, 2.0, 2.0, 1.0, 1.0, 0.0]),
        trajectory=torch.tensor([0, 0, 1, 2, 3, 3, 4]),
    )
    totals = kenpo.weigh(COUPLED, kenpo.prepare(COUPLED, rollouts)).totals
    assert float(totals.contrasts) == 1.0
    assert float(totals.groups) == 4.0
    assert float(totals.trajectories) == 5.0
    alone = kenpo.weigh(COUPLED, kenpo.prepare(COUPLED, rollouts.replace(trajectory=None))).totals
    assert float(alone.trajectories) == 7.0


def test_a_batch_of_which_nothing_is_decided_gives_zero():
    rollouts, policy = tensors(make_case(2))
    result = kenpo.evaluate(COUPLED, rollouts.replace(rewards=torch.ones_like(rollouts.rewards)), policy)
    assert float(result.loss.detach()) == 0.0
    assert not bool(result.coefficients.any())


@pytest.mark.parametrize("far", [30.0, 200.0])
def test_sums_over_a_response_do_not_saturate(far):
    """At a drift of 200 nats from the reference the loss still sees which response drifted, and how far."""
    mask = torch.tensor([[False, *[True] * 10]] * 2)
    ref = torch.full((2, 11), -1.0, dtype=torch.float64)
    logp = ref.clone()
    logp[0, 1:] -= far / 10
    rollouts = kenpo.Rollouts(mask=mask, group=torch.zeros(2).long(), rewards=torch.tensor([1.0, 0.0]), logp_ref=ref)
    result = kenpo.evaluate(kenpo.get("ggpo"), rollouts, kenpo.Policy(logp))
    gap = far + 1.0  # z = (1 + far, 0)
    assert float(result.loss.detach()) == pytest.approx(gap - torch.tensor(2.0).log().item() - gap / 2, rel=1e-6)
    assert result.coefficients[0, 1].item() == pytest.approx(-0.5, abs=1e-6)
    assert result.coefficients[1, 1].item() == pytest.approx(0.5, abs=1e-6)
