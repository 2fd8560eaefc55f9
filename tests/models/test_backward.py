"""Gradients through the fused head equal those of the plain path, for every algorithm and wherever chunks end."""

from __future__ import annotations

import warnings

import pytest
import tiny
import torch
from laws.catalogue import algorithm, names, options
from reference.cases import make_case
from scoring import policy_backward, policy_terms

import kenpo
from kenpo.errors import NonFiniteError
from kenpo.learner.learner import couples_tokens
from kenpo.models import backward
from kenpo.models.backward import cut
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS

pytestmark = pytest.mark.filterwarnings("ignore")
COMPUTED = ("entropy", "topk_logp", "kl_ref")
LOGPS = ("logp_old", "logp_sampler", "logp_ref", "logp_prox", "logp_guided")
KINDS = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


@pytest.fixture(scope="module")
def model():
    return tiny.gpt2(dtype=torch.float64)


@pytest.fixture(scope="module")
def reference():
    return tiny.gpt2(dtype=torch.float64, seed=1).requires_grad_(False)


def gradient(model):
    """The gradients as one vector; taken off the model."""
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def batch_of(model, name, seed, fresh):
    """A random batch with tokens, whose other policies stand near the model, and terms that no model pass gives."""
    case = make_case(seed, finite_junk=True, width=13, **options(name))
    fields = {
        n: torch.tensor(v, dtype=KINDS[ROLLOUT_FIELDS[n].kind])
        for n, v in case["rollouts"].items()
        if n not in ("tokens", "topk_ids", "reward_parts")
    }
    parts = {n: torch.tensor(v, dtype=torch.float64) for n, v in case["rollouts"].get("reward_parts", {}).items()}
    g = torch.Generator().manual_seed(seed)
    shape = fields["mask"].shape
    fields["tokens"] = torch.randint(3, 64, shape, generator=g)
    if "topk_logp_sampler" in fields:
        fields["topk_ids"] = torch.stack([torch.randperm(64, generator=g)[:3] for _ in range(shape[0] * shape[1])])
        fields["topk_ids"] = fields["topk_ids"].reshape(*shape, 3)
    if "support_ids" in fields:  # a menu that holds the token, of the tokens after it and of a place left free
        menu = (fields["tokens"][..., None] + torch.arange(4)) % 64
        fields["support_ids"] = menu.masked_fill(torch.arange(4) == 3, -1)
    rollouts = kenpo.Rollouts(**fields, reward_parts=parts)
    want = frozenset({"topk_logp"}) if rollouts.topk_ids is not None else frozenset()
    with torch.no_grad():
        own = policy_terms(model, rollouts, temperature=0.9, want=want)
    for field in (*LOGPS, "topk_logp_sampler", "topk_logp_old"):
        if getattr(rollouts, field) is not None:
            near = own.topk_logp if field.startswith("topk") else own.logp
            noise = 0.3 * torch.randn(near.shape, generator=g, dtype=torch.float64)
            rollouts = rollouts.replace(**{field: (near + noise).clamp_max(-1e-4)})
    extra = {
        n: torch.tensor(v, dtype=KINDS[POLICY_FIELDS[n].kind])
        for n, v in case["policy"].items()
        if n not in ("logp", *COMPUTED)
    }
    return (rollouts.replace(logp_old=None) if fresh else rollouts), extra


def directly(model, reference, a, rollouts, extra, want):
    """The loss's gradient through autograd on whole logits."""
    policy = policy_terms(model, rollouts, temperature=0.9, want=want, reference=reference).replace(**extra)
    kenpo.evaluate(a, rollouts, policy).loss.backward()
    return gradient(model)


def in_chunks(model, reference, a, rollouts, extra, want, chunk):
    """The same through `policy_backward`, in one phase or two as the algorithm asks; each row measured once."""
    prepared = kenpo.prepare(a, rollouts)
    measured = torch.zeros(len(rollouts))
    grads = None
    if a.two_phase(rollouts):
        with torch.no_grad():
            whole = policy_terms(model, rollouts, temperature=0.9, want=want, reference=reference).replace(**extra)
        batch = kenpo.weigh(a, prepared, whole)
        grads = kenpo.coefficients(a, batch, whole)[1]
    else:
        batch = kenpo.weigh(a, prepared)

    def shares(rows, policy, measure):
        measured[rows] += measure
        if grads is not None:
            return {n: g[rows] for n, g in grads.items()}
        more = {n: v[rows] for n, v in extra.items()}
        return kenpo.coefficients(a, batch[rows], policy.replace(**more), measure)[1]

    divisible = grads is not None or couples_tokens(a, rollouts.logp_old is None) is None
    live = want - ({"kl_ref"} if grads is not None else set())
    policy_backward(
        model, rollouts, shares, temperature=0.9, want=live, reference=reference, divisible=divisible, chunk=chunk
    )
    assert measured.tolist() == [1.0] * len(rollouts)
    return gradient(model)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("fresh", [False, True])
def test_every_algorithm_at_odd_cuts(model, reference, name, fresh):
    a = algorithm(name)
    if fresh and "logp_old" in a.prepare_needs:
        pytest.skip("its advantages are made of logp_old, which is then always scored")
    rollouts, extra = batch_of(model, name, 5, fresh)
    want = frozenset(a.needs) & set(COMPUTED)
    right = directly(model, reference, a, rollouts, extra, want)
    for chunk in (3, 7, 29, 1000):
        got = in_chunks(model, reference, a, rollouts, extra, want, chunk)
        assert float((got - right).norm()) <= 1e-10 * float(right.norm()) + 1e-18, chunk


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma2, tiny.granite, tiny.cohere, tiny.qwen3])
def test_every_kind_of_head(make):
    """Soft caps, logit scales, tied and untied embeddings; with an entropy bonus."""
    more = {"attn_implementation": "eager"} if make is tiny.gemma2 else {}
    model = make(dtype=torch.float64, **more)
    a = kenpo.get("grpo").adding("entropy_bonus").with_settings({"regularizers.entropy_bonus.coef": 0.1})
    rollouts, extra = batch_of(model, "grpo", 6, False)
    want = frozenset({"entropy"})
    right = directly(model, None, a, rollouts, extra, want)
    for chunk in (5, 1000):
        got = in_chunks(model, None, a, rollouts, extra, want, chunk)
        assert float((got - right).norm()) <= 1e-10 * float(right.norm())


def test_a_frozen_head_gets_no_gradient():
    model = tiny.llama(dtype=torch.float64)
    model.lm_head.weight.requires_grad_(False)
    rollouts, extra = batch_of(model, "grpo", 6, False)
    right = directly(model, None, kenpo.get("grpo"), rollouts, extra, frozenset())
    got = in_chunks(model, None, kenpo.get("grpo"), rollouts, extra, frozenset(), 7)
    assert model.lm_head.weight.grad is None
    assert float((got - right).norm()) <= 1e-10 * float(right.norm())


def test_a_bf16_model_comes_near_the_exact_gradient():
    """Forty chunks are no worse than the plain path, and .grad keeps the parameters' dtype."""
    exact, model = tiny.llama(dtype=torch.float64), tiny.llama(dtype=torch.bfloat16)
    rollouts, extra = batch_of(exact, "gspo", 6, False)
    a = kenpo.get("gspo").with_settings({"surrogate.low": 10.0, "surrogate.high": 10.0})  # nothing clips
    right = directly(exact, None, a, rollouts, extra, frozenset())
    plain = directly(model, None, a, rollouts, extra, frozenset()).double()
    got = in_chunks(model, None, a, rollouts, extra, frozenset(), 3).double()
    assert {p.grad for p in model.parameters()} == {None}
    error, usual = (float((x - right).norm() / right.norm()) for x in (got, plain))
    assert error < max(1.5 * usual, 2e-2)


@pytest.mark.parametrize("why", ["few logits", "support", "a hook", "no trainable token"])
def test_what_takes_the_plain_path(model, monkeypatch, why):
    monkeypatch.setattr(backward, "fused_linear_logprob", None)
    rollouts, extra = batch_of(model, "grpo", 6, False)
    chunk, hook = 7, None
    if why == "few logits":
        chunk = None
    elif why == "support":
        rollouts = rollouts.replace(support_ids=torch.full((*rollouts.mask.shape, 2), -1))
    elif why == "a hook":
        hook = model.lm_head.register_forward_hook(lambda m, a, out: out)
    else:
        rollouts = rollouts.replace(mask=torch.zeros_like(rollouts.mask))
    right = directly(model, None, kenpo.get("grpo"), rollouts, extra, frozenset())
    got = in_chunks(model, None, kenpo.get("grpo"), rollouts, extra, frozenset(), chunk)
    if hook is not None:
        hook.remove()
    assert float((got - right).norm()) <= 1e-12 * float(right.norm())


def test_bad_terms_stay_a_named_error(model):
    rollouts, extra = batch_of(model, "grpo", 6, False)
    broken = rollouts.logp_ref.masked_fill(rollouts.mask, torch.nan)
    with pytest.raises(NonFiniteError, match="logp_ref"), warnings.catch_warnings():
        in_chunks(model, None, kenpo.get("grpo"), rollouts.replace(logp_ref=broken), extra, frozenset(), 7)


def test_every_row_is_in_one_piece():
    for counts in ([], [0, 0], [5], [2, 0, 1, 7, 3], [3, 3, 3], [0, 9, 0]):
        for chunk in (1, 2, 3, 8, 100):
            pieces = cut(counts, chunk)
            assert [r for p in pieces for r in range(p.rows.start, p.rows.stop)] == list(range(len(counts)))
            for p in pieces:
                assert sum(p.sizes) == sum(counts[p.rows])
                assert max(p.sizes) <= chunk
                assert len(p.sizes) == 1 or p.rows.stop - p.rows.start == 1
