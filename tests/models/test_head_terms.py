"""Terms without whole logits equal those with them, for every kind of head, entropy, chosen ids and a reference."""

import pytest
import tiny
import torch
from scoring import policy_terms

from kenpo.errors import InputError, MissingFieldError
from kenpo.models import head as heads
from kenpo.models.head import find_head, head_terms, pick_terms
from kenpo.types import Rollouts

D = torch.float64
ALL = frozenset({"entropy", "topk_logp", "kl_ref"})
FAMILIES = [tiny.gpt2, tiny.llama, tiny.gemma2, tiny.granite, tiny.cohere]


def made(make, seed=0):
    more = {"attn_implementation": "eager"} if make is tiny.gemma2 else {}
    return make(dtype=D, seed=seed, **more)


def batch():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (4, 12), generator=g)
    mask = torch.zeros(4, 12, dtype=torch.bool)
    for r, (start, stop) in enumerate([(2, 12), (5, 6), (1, 9), (4, 11)]):
        mask[r, start:stop] = True
    ids = torch.randint(64, (4, 12, 3), generator=g)
    ids[..., 2] = torch.where(torch.rand(4, 12, generator=g) < 0.3, -1, ids[..., 2])
    return Rollouts(tokens=tokens, mask=mask, topk_ids=ids, group=torch.zeros(4, dtype=torch.int64),
                    rewards=torch.zeros(4))  # fmt: skip


def terms_and_gradient(model, reference, want):
    model.zero_grad()
    terms = policy_terms(model, batch(), temperature=0.8, want=want, reference=reference)
    weight = torch.sin(torch.arange(48, dtype=D)).reshape(4, 12)
    loss = sum((weight * (v if v.dim() == 2 else v.sum(-1))).sum() * (i + 1) for i, v in enumerate(
        terms.tensors().values()))  # fmt: skip
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return terms.detach().tensors(), torch.cat([x.flatten() for x in grads])


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("want", [frozenset(), ALL], ids=["logp", "all"])
def test_tiles_of_the_vocabulary_or_whole_logits(make, want, monkeypatch):
    model, reference = made(make), made(make, 1)
    assert find_head(model).linear() is not None
    plain, right = terms_and_gradient(model, reference, want)
    monkeypatch.setattr(heads, "FEW_LOGITS", 0)
    monkeypatch.setattr(heads, "pick_terms", None)  # whole logits are not made
    tiled, got = terms_and_gradient(model, reference, want)
    assert tiled.keys() == plain.keys() == want | {"logp"}
    for name, value in plain.items():
        assert float((tiled[name] - value).abs().max()) <= 1e-10 * float(value.abs().max()), name
    assert float((got - right).norm()) <= 1e-10 * float(right.norm())


def test_the_divergence_is_that_of_the_definition(monkeypatch):
    """Σ p (log p − log q) from the models' own logits; 0 from itself."""
    model, reference = made(tiny.llama), made(tiny.gpt2, 1)
    rollouts = batch()
    with torch.no_grad():
        p, q = ((m(rollouts.tokens).logits / 0.8).log_softmax(-1) for m in (model, reference))
        right = (p.exp() * (p - q)).sum(-1)[:, :-1]
        for few in (heads.FEW_LOGITS, 0):
            monkeypatch.setattr(heads, "FEW_LOGITS", few)
            for other, want in ((reference, right), (model, torch.zeros_like(right))):
                got = policy_terms(model, rollouts, temperature=0.8, want=frozenset({"kl_ref"}), reference=other).kl_ref
                at = rollouts.mask[:, 1:]
                assert torch.allclose(got[:, 1:][at], want[at], rtol=1e-6, atol=1e-8)
                assert not bool(got[~rollouts.mask].any())


def test_under_a_support_the_divergence_is_of_the_restricted_distributions():
    logits, other = (torch.randn(1, 6, dtype=D, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    logits.requires_grad_()
    support = torch.tensor([[0, 3, 4, -1]])
    terms = pick_terms(logits, torch.tensor([3]), 1.0, frozenset({"kl_ref"}), support, None, other)
    p, q = (x[:, [0, 3, 4]].log_softmax(-1) for x in (logits, other))
    assert terms["kl_ref"].item() == pytest.approx(float((p.exp() * (p - q)).sum().detach()), abs=1e-12)
    (grad,) = torch.autograd.grad(terms["kl_ref"].sum(), logits)
    (right,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits)
    assert torch.allclose(grad, right, atol=1e-12)


@pytest.mark.parametrize("why", ["adapter", "support", "few"])
def test_what_keeps_whole_logits(why, monkeypatch):
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    monkeypatch.setattr(heads, "linear_logprob", None)
    if why != "few":
        monkeypatch.setattr(heads, "FEW_LOGITS", 0)
    linear = (Adapted if why == "adapter" else torch.nn.Linear)(8, 30, dtype=D)
    support = torch.full((5, 2), -1) if why == "support" else None
    hidden, targets = torch.randn(5, 8, dtype=D), torch.arange(5)
    got = head_terms(hidden, heads.Head(None, linear), targets, 1.0, frozenset(), support)["logp"]
    assert torch.equal(got, pick_terms(linear(hidden), targets, 1.0, frozenset())["logp"])


def test_a_missing_reference_is_named():
    with pytest.raises(MissingFieldError, match="reference"):
        policy_terms(made(tiny.gpt2), batch(), temperature=1.0, want=frozenset({"kl_ref"}))
    with pytest.raises(InputError, match="kl_sampler"):
        policy_terms(made(tiny.gpt2), batch(), temperature=1.0, want=frozenset({"kl_sampler"}))
