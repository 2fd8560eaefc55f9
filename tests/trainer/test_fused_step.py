"""The update through the fused head takes the plain path's step, and the plan says which path runs."""

import pytest
import torch
from scoring import policy_terms

import kenpo
from kenpo.learner.memory import ModelFacts
from kenpo.learner.telling import head_path
from kenpo.models import backward, head
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.ranks import Ranks
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.plan import plan_passes
from kenpo.types import Rollouts
from trainer.stubs import updater_of


@pytest.fixture(scope="module")
def batch(models):
    """Three groups of three, with sampler log-probs near the model's."""
    model, _ = load_model(str(models / "gpt2"), dtype="float64")
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.full((9, 20), -1), torch.zeros(9, 20, dtype=torch.bool)
    for r in range(9):
        start, n = 2 + r % 3, int(torch.randint(1, 14, (), generator=g))
        tokens[r, : start + n] = torch.randint(3, 17, (start + n,), generator=g)
        mask[r, start : start + n] = True
    rewards = torch.rand(9, generator=g, dtype=torch.float64)
    made = Rollouts(mask=mask, group=torch.arange(9) // 3, rewards=rewards, tokens=tokens)
    with torch.no_grad():
        logp = policy_terms(model, made, temperature=0.9).logp
    noise = torch.randn(logp.shape, generator=g, dtype=torch.float64)
    return made.replace(logp_sampler=logp + 0.2 * noise, truncated=mask.sum(1) > 11)


def step(folder, name, batch):
    """(gradient, figures) of one update of two microbatches, the reference being another model."""
    model, _ = load_model(str(folder), dtype="float64")
    reference, _ = load_model(str(folder), dtype="float64", trainable=False)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.1)
    config = resolve(TrainConfig(model=str(folder), microbatch_tokens=90, temperature=0.9, threads=1, grad_clip=0))
    algorithm = kenpo.get(name)
    passes = plan_passes(algorithm, config, 17)
    report = updater_of(model, algorithm, config, passes, Ranks(), reference).update(batch, None, 1)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), {**report.sums, **report.extremes}


@pytest.mark.parametrize("chunk", [4, 31])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "mis", "m2po", "stapo", "zcpo"])
def test_one_step_of_either_path(models, batch, monkeypatch, name, chunk):
    plain, usual = step(models / "gpt2", name, batch)
    monkeypatch.setattr(backward, "FEW_LOGITS", 0)
    monkeypatch.setattr(head, "FEW_LOGITS", 0)
    monkeypatch.setattr(backward, "chunk_positions", lambda *a: chunk)
    calls, real = [], backward.fused_linear_logprob
    monkeypatch.setattr(backward, "fused_linear_logprob", lambda *a, **k: calls.append(1) or real(*a, **k))
    fused, figures = step(models / "gpt2", name, batch)
    assert len(calls) > 1
    assert (fused - plain).norm() <= 1e-10 * plain.norm()
    assert plain.norm() > 1e-6
    assert figures.keys() == usual.keys()
    for key, value in usual.items():
        assert figures[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_the_plan_names_the_path(models):
    model, _ = load_model(str(models / "gpt2"))
    facts = ModelFacts.of(Scorer(model))
    config = resolve(TrainConfig(model=str(models / "gpt2"), microbatch_tokens=2**20))

    def path(name, **changes):
        algorithm, changed = kenpo.get(name), config.but(**changes)
        restricted = bool(changed.top_k) or changed.top_p < 1
        passes = plan_passes(algorithm, changed, 17)
        return head_path(changed.microbatch_tokens, restricted, algorithm, passes, facts)

    assert path("grpo").endswith("three matrix products")
    assert "sequence_ratio couples their tokens" in path("gspo")
    assert "four matrix products" in path("m2po")
    assert "are few" in path("grpo", microbatch_tokens=64)
    assert "top-k" in path("grpo", top_p=0.9)
    hook = model.lm_head.register_forward_hook(lambda m, a, out: out)
    assert ModelFacts.of(Scorer(model)).chunk is None
    hook.remove()
