"""Minibatches are cut by the tokens that run: shared prompts counted once, nothing behind the last trainable token."""

from dataclasses import replace

import pytest
import torch

import kenpo
from kenpo.learner.cutting import Unit, deal, microbatches, units
from kenpo.models import packing, shared_prompt
from kenpo.models.loading import load_model
from kenpo.models.passes import prompt_keys
from kenpo.ranks import Ranks
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.plan import plan_passes
from kenpo.types import Rollouts
from trainer.stubs import updater_of


def rollouts(shapes, seed=0):
    """Groups of rows from [(prompt length, [response lengths])]; the members of a group share their prompt's tokens."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for group, (prompt, responses) in enumerate(shapes):
        head = torch.randint(3, 17, (prompt,), generator=g).tolist()
        for n in responses:
            rows.append((group, head, torch.randint(3, 17, (n,), generator=g).tolist()))
    width = max(len(p) + len(r) for _, p, r in rows) + 3
    tokens, mask = torch.full((len(rows), width), -1), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (_, p, r) in enumerate(rows):
        tokens[i, : len(p) + len(r)] = torch.tensor(p + r)
        mask[i, len(p) : len(p) + len(r)] = True
    return Rollouts(
        tokens=tokens, mask=mask, group=torch.tensor([x for x, _, _ in rows]),
        rewards=torch.rand(len(rows), generator=g, dtype=torch.float64),
    )  # fmt: skip


def test_rows_alone_are_bucketed_by_length():
    batch = rollouts([(2, [4]), (2, [0]), (2, [8]), (2, [2]), (2, [2]), (2, [29])])
    cut = units(batch, range(6), 12)
    assert sorted(u.width for u in cut) == [0, 3, 3, 5, 9, 30]
    buckets = microbatches(cut, 12)
    width = {u.rows[0]: u.width for u in cut}
    assert sorted(r for b in buckets for r in b) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(width[r] for r in b) <= 12 for b in buckets)


def test_what_stands_behind_the_last_trainable_token_costs_nothing():
    batch = rollouts([(4, [6])])
    batch.mask[0, 6:] = False
    assert units(batch, [0], 99) == [Unit((0,), 0, 5)]


def test_a_family_counts_its_prompt_once_and_stays_together():
    batch = rollouts([(20, [3, 5, 4]), (20, [3, 3, 3]), (2, [6, 6, 6])])
    cut = units(batch, range(9), 100, prompt_keys(batch))
    assert Unit((1, 2, 0), 19, 5) in cut  # the last prompt token runs with each row, the last token never
    assert Unit((3, 4, 5), 19, 3) in cut
    assert sum(len(u.rows) == 1 for u in cut) == 3
    assert cut[0].cost == 19 + 3 * 5
    together = microbatches(cut, 19 * 2 + 6 * 5)
    assert together == [[1, 2, 0, 3, 4, 5], [6, 7, 8]]
    assert microbatches(cut, 19 * 2 + 6 * 5 - 1)[:2] == [[1, 2, 0], [3, 4, 5]]


def test_packed_rows_count_their_own_tokens():
    batch = rollouts([(1, [9, 2, 2, 2])])
    cut = units(batch, range(4), 10**6)
    assert [u.cost for u in cut] == [9, 2, 2, 2]
    assert microbatches(cut, 15) == [[0], [1, 2, 3]]
    assert microbatches(cut, 15, packed=True) == [[0, 1, 2, 3]]
    assert microbatches(cut, 13, packed=True) == [[0, 1, 2], [3]]


def test_a_family_above_the_budget_is_split_evenly():
    batch = rollouts([(20, [4] * 8)])
    cut = units(batch, range(8), 19 + 5 * 4, prompt_keys(batch))
    assert [len(u.rows) for u in cut] == [4, 4]
    assert all(u.prompt == 19 for u in cut)
    with pytest.warns(UserWarning, match="--microbatch-tokens 5 holds no two samples"):
        assert [u.prompt for u in units(batch, range(8), 5, prompt_keys(batch))] == [0] * 8


@pytest.mark.parametrize("size", [2, 3, 16])
def test_ranks_share_units_without_overlap(size):
    batch = rollouts([(20, [3, 5, 4]), (20, [3, 3, 3]), (2, [6, 6, 6])])
    cut = units(batch, range(9), 100, prompt_keys(batch))
    dealt = deal(cut, size)
    assert sorted(r for part in dealt for u in part for r in u.rows) == list(range(9))
    if size == 2:
        loads = [sum(u.cost for u in part) for part in dealt]
        assert max(loads) <= 1.5 * min(loads)


@pytest.mark.parametrize(("family", "tolerance"), [("gpt2", 1e-10), ("qwen3", 1e-6)])
@pytest.mark.parametrize("name", ["grpo", "gspo", "m2po"])
def test_a_step_with_shared_prompts_is_the_step_without(models, monkeypatch, family, tolerance, name):
    """Old and reference passes, two phases (m2po) and the gradient, on several budgets."""
    batch = rollouts([(20, [3, 5, 4, 6]), (23, [3, 3, 2, 5]), (2, [6, 4, 6, 1]), (20, [1, 0, 4, 4])])

    def step(least, budget, how="off"):
        monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", least)
        monkeypatch.setattr(shared_prompt, "LEAST_SHARE", 0.3 if least == 1 else 2.0)
        model, _ = load_model(str(models / family), dtype="float64")
        torch.manual_seed(0)
        with torch.no_grad():  # far from uniform, so that gradients are not all alike
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
        reference, _ = load_model(str(models / family), dtype="float64", trainable=False)
        config = TrainConfig(model="x", microbatch_tokens=budget, packing=how, threads=1, grad_clip=0, lr=0.0, epochs=2)
        config = resolve(config)
        algorithm = kenpo.get(name)
        passes = replace(plan_passes(algorithm, config, 17), old=True)
        updater = updater_of(model, algorithm, config, passes, Ranks(), reference)
        with torch.no_grad():
            mu = updater.reference.terms(batch).logp
        report = updater.update(batch.replace(logp_sampler=mu), None, 1)
        return torch.cat([p.grad.flatten() for p in model.parameters()]), report

    want, report = step(10**9, 10**6)
    runs = []
    run = shared_prompt.run
    monkeypatch.setattr(shared_prompt, "run", lambda *args: runs.append(1) or run(*args))
    packed = []
    lay = packing.run
    monkeypatch.setattr(packing, "run", lambda *args: packed.append(1) or lay(*args))
    for budget, how in ((10**6, "off"), (100, "off"), (40, "off"), (100, "on")):
        got, other = step(1, budget, how)
        assert runs
        assert bool(packed) == (how == "on")
        runs.clear()
        assert float((got - want).norm() / want.norm()) < tolerance
        assert torch.allclose(other.rollouts.logp_old, report.rollouts.logp_old, atol=tolerance)
