"""A prompt that runs once gives the log-probs and gradients of one that runs once per row."""

import warnings

import pytest
import tiny
import torch
from scoring import policy_terms

from kenpo.errors import InputError
from kenpo.models import shared_prompt
from kenpo.models.scorer import Scorer
from kenpo.types import Rollouts

ENTROPY = frozenset({"entropy"})
LONG = list(range(5, 25))
SHORT = list(range(30, 42))
# prompt, then response tokens; None stands for a token the policy did not sample (a tool's), -1 for no token
ROWS = [
    (LONG, [3, 4, 5, 2]), (LONG, [9, 8]), (LONG, [7]), (LONG, [3, 4, 5]),
    (SHORT, [21, 22]), (SHORT, [23, 24, 25]), (SHORT, [26]),
    ([50, 51, 52], [53, 54]), ([*LONG[:-1], 60], [3, 4]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Share from the first token saved on."""
    monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", 1)


@pytest.fixture
def forwards(monkeypatch):
    """Shapes of the ids that went through the decoder for shared prompts, the trial's left out."""
    seen = []
    run, probe = shared_prompt.call, shared_prompt._probe
    monkeypatch.setattr(shared_prompt, "call", lambda m, ids, **how: seen.append(ids.shape) or run(m, ids, **how))
    monkeypatch.setattr(shared_prompt, "_probe", lambda module: (probe(module), seen.clear())[0])
    return seen


def batch(rows=ROWS, left=False, holes=False):
    tokens, masks = [], []
    for i, (prompt, response) in enumerate(rows):
        t, m = prompt + response, [0] * len(prompt) + [1] * len(response)
        if holes:  # two turns: something the policy did not sample, then more that it did
            t, m = [*t, 40 + i, 41, 11 + i, 12], [*m, 0, 0, 1, 1]
        tokens.append(t)
        masks.append(m)
    width = max(map(len, tokens)) + 2

    def pad(x, v):
        return [v] * (width - len(x)) + x if left else x + [v] * (width - len(x))

    return Rollouts(
        tokens=torch.tensor([pad(t, -1) for t in tokens]),
        mask=torch.tensor([pad(m, 0) for m in masks], dtype=torch.bool),
        group=torch.zeros(len(rows), dtype=torch.long),
        rewards=torch.zeros(len(rows)),
    )


def value_and_gradient(model, rollouts, packing="auto", **how):
    model.zero_grad()
    terms = policy_terms(model, rollouts, temperature=0.8, want=ENTROPY, packing=packing, **how)
    weight = torch.sin(torch.arange(rollouts.mask.numel(), dtype=terms.logp.dtype)).reshape(rollouts.mask.shape)
    (weight * (terms.logp + 0.3 * terms.entropy)).sum().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return terms.logp.detach(), torch.cat([g.flatten() for g in grads])


def unshared(model, rollouts, monkeypatch, **how):
    with monkeypatch.context() as m:
        m.setattr(shared_prompt, "LEAST_TOKENS", 10**9)
        return value_and_gradient(model, rollouts, **how)


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        (tiny.gpt2, torch.float64, 1e-10),
        (tiny.llama, torch.float64, 1e-6),
        (tiny.qwen3, torch.float64, 1e-6),
        (tiny.gemma, torch.float64, 1e-6),
        (tiny.llama, torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_equals_every_row_with_its_own_prompt(make, dtype, tolerance, holes, left, monkeypatch, forwards):
    model, rollouts = make(dtype=dtype), batch(left=left, holes=holes)
    plain = unshared(model, rollouts, monkeypatch)
    assert forwards == []
    shared = value_and_gradient(model, rollouts)
    assert forwards[-2][0] == 2  # two prompts, of different lengths, once each; two rows had none to share
    assert forwards[-1][0] == 7
    assert torch.allclose(shared[0], plain[0], rtol=0, atol=tolerance * 10)
    assert float((shared[1] - plain[1]).norm() / plain[1].norm()) < tolerance


def test_one_prompt_needs_neither_mask_nor_copy(monkeypatch):
    model, rollouts = tiny.gpt2(dtype=torch.float64), batch(ROWS[:4])
    plain = unshared(model, rollouts, monkeypatch)
    seen = []
    hand_out = shared_prompt._hand_out

    def watch(cache, owner, prompts):
        before = cache.layers[0].keys.data_ptr()
        hand_out(cache, owner, prompts)
        if prompts == 1:  # in the trial there are two
            seen.append(before == cache.layers[0].keys.data_ptr())

    monkeypatch.setattr(shared_prompt, "_hand_out", watch)
    shared = value_and_gradient(model, rollouts)
    assert seen == [True]
    assert float((shared[1] - plain[1]).norm() / plain[1].norm()) < 1e-10


def test_without_gradient_too(monkeypatch, forwards):
    model, rollouts = tiny.qwen3(), batch()
    plain = unshared(model, rollouts, monkeypatch)[0]
    with torch.no_grad():
        assert torch.allclose(policy_terms(model, rollouts, temperature=0.8).logp, plain, atol=1e-5)
    assert forwards


@pytest.mark.parametrize("make", [tiny.gemma2, tiny.mistral, tiny.bloom])
def test_models_that_can_not_fall_back_and_say_so_once(make, monkeypatch, forwards):
    model, rollouts = make(), batch()
    plain = unshared(model, rollouts, monkeypatch)
    with pytest.warns(UserWarning, match=rf"{type(model).__name__}.*(sliding-window|position_ids)"):
        got = value_and_gradient(model, rollouts)
    assert torch.equal(got[0], plain[0])
    assert forwards == []
    scorer = Scorer(model)
    with pytest.warns(UserWarning, match="once per sample"):
        scorer.terms(rollouts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.terms(rollouts)


def test_the_rule_counts_tokens():
    assert shared_prompt.saved(8, [100] * 8) == 0  # a short prompt: 56 of 800 tokens
    assert shared_prompt.saved(8, [40] * 8) == 56
    assert shared_prompt.saved(512, [576] * 8) == 7 * 512
    assert shared_prompt.saved(512, [576]) == 0
    assert shared_prompt.saved(0, [20] * 8) == 0
    found, spared = shared_prompt.families([b"a", b"b", b"a", b"c"], [9, 9, 9, 2], [10, 10, 10, 5])
    assert (found, spared) == ([shared_prompt.Family([0, 2], 9)], 9)


def test_small_batches_are_left_alone(monkeypatch, forwards):
    monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", 256)
    policy_terms(tiny.gpt2(), batch(), temperature=1.0)
    assert forwards == []


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama])
def test_checkpointed_layers_give_the_same_gradient_and_share_nothing(make, monkeypatch, forwards):
    model, rollouts = make(dtype=torch.float64), batch()
    plain = unshared(model, rollouts, monkeypatch)
    runs = []
    mlp = next(m for n, m in model.named_modules() if n.endswith(".mlp"))
    mlp.register_forward_pre_hook(lambda *_: runs.append(mlp.training))
    with pytest.warns(UserWarning, match="checkpointing"):
        got = value_and_gradient(model, rollouts, checkpointing=True)
    assert runs[-2:] == [False, False]  # forward, and again in the backward pass; what is inside stays in eval mode
    assert forwards == []
    assert float((got[1] - plain[1]).norm() / plain[1].norm()) < 1e-12
    assert not any(m.training for m in model.modules())


def test_checkpointed_layers_drop_nothing_of_their_own(monkeypatch):
    model, rollouts = tiny.opt(dtype=torch.float64), batch()
    plain = unshared(model, rollouts, monkeypatch)
    got = unshared(model, rollouts, monkeypatch, checkpointing=True)
    assert torch.allclose(got[0], plain[0], atol=1e-12)
    assert float((got[1] - plain[1]).norm() / plain[1].norm()) < 1e-10


def test_layers_that_compute_something_else_in_training_mode_are_refused():
    model = tiny.llama()
    layer = type(model.model.layers[0])
    run = layer.forward

    class Odd(layer):
        def forward(self, hidden_states, *rest, **more):
            return run(self, hidden_states * (2 if self.training else 1), *rest, **more)

    model.model.layers[0].__class__ = Odd
    with pytest.raises(InputError, match="something else in training mode"):
        Scorer(model, checkpointing=True)
    policy_terms(model, batch(), temperature=1.0).logp.sum().backward()


def test_checkpointed_layers_share_prompts_without_gradient(forwards):
    Scorer(tiny.gpt2(), checkpointing=True).terms(batch())
    assert forwards


def test_nan_is_no_agreement(monkeypatch):
    run = shared_prompt.run
    monkeypatch.setattr(shared_prompt, "run", lambda *a: run(*a)._replace(states=run(*a).states * torch.nan))
    model = tiny.llama()
    assert "nan" in shared_prompt.reason_against(model, model.model)
