"""Rollouts whose coefficients are all 0 run no backward pass, and everything else stays as it was."""

import dataclasses

import pytest
import torch
from scoring import policy_terms

import kenpo
from kenpo.learner import learner as learner_module
from kenpo.learner.idle import idle_rows, why_none_is_idle
from kenpo.learner.telling import backward_path
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.ranks import Ranks
from kenpo.stages.base import Surrogate
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.plan import plan_passes
from kenpo.types import Rollouts
from trainer.stubs import updater_of

UNIFORM = {0: 1.0, 2: 0.0}  # group -> the outcome of all its rollouts
IDLE = [r for r in range(16) if r // 4 in UNIFORM]


@pytest.fixture(scope="module")
def batch(models):
    """Four groups of four, each with a prompt of its own; two groups are all alike."""
    model, _ = load_model(str(models / "gpt2"), dtype="float64")
    g = torch.Generator().manual_seed(3)
    tokens, mask = torch.full((16, 30), -1), torch.zeros(16, 30, dtype=torch.bool)
    for r in range(16):
        prompt, n = 6 + r // 4, int(torch.randint(2, 15, (), generator=g))
        tokens[r, :prompt] = 3 + (torch.arange(prompt) * (r // 4 + 1)) % 11
        tokens[r, prompt : prompt + n] = torch.randint(3, 17, (n,), generator=g)
        mask[r, prompt : prompt + n] = True
    rewards = torch.tensor([UNIFORM.get(r // 4, float(r % 2)) for r in range(16)], dtype=torch.float64)
    made = Rollouts(mask=mask, group=torch.arange(16) // 4, rewards=rewards, tokens=tokens)
    with torch.no_grad():
        logp = policy_terms(model, made, temperature=0.9).logp
    noise = lambda s: logp + s * torch.randn(logp.shape, generator=g, dtype=torch.float64)  # noqa: E731
    return made.replace(logp_old=noise(0.2), logp_sampler=noise(0.2), logp_ref=noise(0.2), truncated=mask.sum(1) > 12)


def algorithm_of(name):
    return kenpo.get("grpo").but(regularizers=()) if name == "grpo-no-kl" else kenpo.get(name)


def one_step(models, name, batch):
    """(gradient, parameters, figures, rows that ran with gradient, rows that ran without)."""
    folder = models / "gpt2"
    model, _ = load_model(str(folder), dtype="float64")
    reference, _ = load_model(str(folder), dtype="float64", trainable=False)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.1)
    config = resolve(TrainConfig(model=str(folder), microbatch_tokens=90, temperature=0.9, threads=1, grad_clip=0))
    algorithm = algorithm_of(name)
    updater = updater_of(model, algorithm, config, plan_passes(algorithm, config, 17), Ranks(), reference)
    places = {row.tobytes(): r for r, row in enumerate(batch.tokens.numpy())}
    seen = {True: [], False: []}

    def spy(function, grad):
        def spied(scorer, rollouts, *args, **kw):
            if rollouts.mask.any():
                seen[grad] += [places[row.tobytes()] for row in rollouts.tokens.numpy()]
            return function(scorer, rollouts, *args, **kw)

        return spied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "backward", spy(Scorer.backward, True))
        patch.setattr(Scorer, "terms", spy(Scorer.terms, False))
        report = updater.update(batch, None, 1)
    flat = [torch.cat([t.flatten() for t in x]) for x in zip(*[(p.grad, p.detach()) for p in model.parameters()])]  # noqa: B905
    return *flat, {**report.sums, **report.extremes}, sorted(seen[True]), sorted(seen[False])


@pytest.mark.parametrize("name", ["grpo-no-kl", "gspo", "cispo", "mis", "trm", "rloo"])
def test_alike_groups_are_only_measured(models, batch, monkeypatch, name):
    grad, moved, figures, forward_and_back, forward = one_step(models, name, batch)
    assert forward == IDLE
    assert forward_and_back == [r for r in range(16) if r not in IDLE]
    assert figures.pop("idle") == [8.0, 16.0]
    monkeypatch.setattr(learner_module, "idle_rows", lambda a, b: b.prepared.selected & False)
    every, moved_by_all, usual, forward_and_back, forward = one_step(models, name, batch)
    assert forward_and_back == list(range(16))
    assert forward == []
    assert usual.pop("idle") == [0.0, 16.0]
    assert every.norm() > 1e-6
    assert (grad - every).norm() <= 1e-12 * every.norm()
    assert (moved - moved_by_all).norm() <= 1e-9 * moved_by_all.norm()
    assert figures.keys() == usual.keys()
    for key, value in usual.items():
        assert figures[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_two_phases_leave_out_what_has_no_coefficient(models, batch):
    """M2PO scores all rollouts first; its second pass takes those of mixed groups alone."""
    _, _, figures, forward_and_back, scored = one_step(models, "m2po", batch)
    assert scored == list(range(16))
    assert set(forward_and_back).isdisjoint(IDLE)
    assert forward_and_back
    assert figures["idle"] == [16.0 - len(forward_and_back), 16.0]
    model, _ = load_model(str(models / "gpt2"), dtype="float64")
    policy = policy_terms(model, batch, temperature=0.9)
    kenpo.evaluate(kenpo.get("m2po"), batch, policy).loss.backward()
    direct = torch.cat([p.grad.flatten() for p in model.parameters()])
    ours = one_step(models, "m2po", batch)[0]
    assert (ours - direct).norm() <= 1e-12 * direct.norm()


def test_a_penalty_moves_alike_groups_too(models, batch):
    grad, _, figures, forward_and_back, _ = one_step(models, "grpo", batch)
    assert forward_and_back == list(range(16))
    assert figures["idle"] == [0.0, 16.0]
    alone = one_step(models, "grpo-no-kl", batch)[0]
    assert (grad - alone).norm() > 1e-6 * alone.norm()


def test_nothing_to_learn_is_still_a_step(models, batch):
    """All groups alike: gradient 0, figures of every rollout, an optimizer step as AdamW takes it."""
    grad, _, figures, forward_and_back, forward = one_step(
        models, "gspo", batch.replace(rewards=torch.ones_like(batch.rewards))
    )
    assert not grad.any()
    assert forward_and_back == []
    assert forward == list(range(16))
    assert figures["idle"] == [16.0, 16.0]
    assert figures["grad_norm"] == [0.0, 1.0]
    assert figures["update_skipped"] == [0.0, 1.0]
    assert figures["entropy"][1] == float(batch.mask.sum())


def test_a_rollout_stays_with_its_group(batch):
    """A weight of 0 on one rollout alone leaves its group whole: its prompt would run twice otherwise."""
    algorithm = kenpo.get("gspo")
    weighed = kenpo.weigh(algorithm, kenpo.prepare(algorithm, batch))
    weights = batch.mask.double()
    weights[4] = 0  # of group 1, which is mixed
    assert idle_rows(algorithm, weighed).nonzero().squeeze(1).tolist() == IDLE
    part = dataclasses.replace(weighed, weights=weights)
    assert idle_rows(algorithm, part).nonzero().squeeze(1).tolist() == IDLE
    weights[5:8] = 0
    assert idle_rows(algorithm, part).nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_dropped_rollout_is_not_idle_but_absent(batch):
    algorithm = kenpo.get("gspo")
    rewards = batch.rewards.clone()
    rewards[0] = torch.nan
    idle = idle_rows(algorithm, kenpo.weigh(algorithm, kenpo.prepare(algorithm, batch.replace(rewards=rewards))))
    assert idle.nonzero().squeeze(1).tolist() == IDLE[1:]


class Stubborn(kenpo.Algorithm):
    """Adds the log-probs to the loss, whatever the advantages."""

    def objective(self, batch, policy, measure=True):
        loss = super().objective(batch, policy, measure)
        return dataclasses.replace(loss, loss=loss.loss + policy.logp.sum())


def test_an_objective_of_its_own_is_not_second_guessed(batch):
    plain = kenpo.get("gspo")
    own = Stubborn(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)})
    assert "objective of its own" in why_none_is_idle(own)
    assert not idle_rows(own, kenpo.weigh(own, kenpo.prepare(own, batch))).any()


@dataclasses.dataclass(frozen=True)
class Inner(Surrogate):
    """Differentiates inside itself."""

    def __call__(self, ratio, ctx):
        (slope,) = torch.autograd.grad(ratio.sum(), ratio, retain_graph=True)
        return ratio * ctx.advantages * slope


def test_a_stage_may_differentiate_inside_itself(models, batch, monkeypatch):
    monkeypatch.setattr("trainer.test_idle.algorithm_of", lambda name: kenpo.get("gspo").but(surrogate=Inner()))
    assert one_step(models, "inner", batch)[4] == IDLE


def test_the_plan_says_what_runs_backward(models):
    config = resolve(TrainConfig(model=str(models / "gpt2")))

    def path(name):
        algorithm = algorithm_of(name)
        return backward_path(algorithm, plan_passes(algorithm, config, 17))

    assert "kl_to_reference" in path("grpo")
    assert path("grpo").startswith("every rollout")
    assert "only measured" in path("gspo")
    assert "left out" in path("m2po")
