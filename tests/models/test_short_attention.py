"""Attention over few keys gives what torch's fused attention gives, and models that use something else keep theirs."""

from __future__ import annotations

import pytest
import tiny
import torch

from kenpo.engines.base import SamplingOptions
from kenpo.engines.decoding import CachedDecoder, UncachedDecoder, choose
from kenpo.engines.hf import HFEngine
from kenpo.models import shared_prompt
from kenpo.models import short_attention as short
from kenpo.models.checkpointing import enable_checkpointing
from kenpo.models.policy import policy_terms
from models.test_shared_prompt import ROWS, batch, value_and_gradient


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that came here and stayed."""
    seen = []
    grouped = short.grouped

    def watch(query, *rest):
        seen.append(query.shape)
        return grouped(query, *rest)

    monkeypatch.setattr(short, "grouped", watch)
    return seen


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3, tiny.gpt2, tiny.gemma])
@pytest.mark.parametrize("prompts", [[[5, 9, 7], [4, 8]], [[5, 9, 7], [4, 8, 3]]], ids=["padded", "level"])
def test_one_token_equals_a_plain_forward(make, prompts, calls):
    model = make(dtype=torch.float64)
    decoder, plain = CachedDecoder(model), UncachedDecoder(model)
    owner = torch.tensor([0, 0, 1])
    assert short.usable(model)
    with torch.no_grad():
        for d in (decoder, plain):
            d.start(prompts, owner)
        calls.clear()
        for t in range(4):
            ids = torch.tensor([3 + t, 9, 11 + t])
            assert torch.allclose(decoder.step(ids), plain.step(ids), atol=1e-6)
    assert calls
    assert all(shape[2] == 1 for shape in calls)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("least", [1, 10**9], ids=["shared", "unshared"])
@pytest.mark.parametrize("make", [tiny.qwen3, tiny.mistral])
def test_training_passes_have_the_same_gradients(make, least, packing, calls, monkeypatch):
    """Grouped heads: shared prompts, whole rows, packed rows, sliding windows."""
    monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", least)
    model, rollouts = make(dtype=torch.float64), batch(ROWS)
    with monkeypatch.context() as m:
        m.setattr(short, "usable", lambda model: False)
        plain = value_and_gradient(model, rollouts, packing=packing)
    assert calls == []
    monkeypatch.setattr(short, "FEW_KEYS", 512)
    found = value_and_gradient(model, rollouts, packing=packing)
    assert any(shape[2] > 1 for shape in calls)
    assert torch.allclose(found[0], plain[0], atol=1e-6)
    assert float((found[1] - plain[1]).norm() / plain[1].norm()) < 1e-6


def test_long_rows_and_single_heads_keep_the_fused_attention(calls, monkeypatch):
    value_and_gradient(tiny.llama(), batch(ROWS))  # every query head has keys of its own
    assert calls == []
    model = tiny.qwen3()
    assert short.usable(model)
    calls.clear()
    monkeypatch.setattr(short, "FEW_KEYS", 5)
    value_and_gradient(model, batch(ROWS))
    assert calls == []


@pytest.mark.parametrize("why", ["eager", "bfloat16", "checkpointed"])
def test_others_keep_theirs(why, calls):
    model = tiny.qwen3(dtype=torch.bfloat16 if why == "bfloat16" else torch.float32)
    if why == "eager":
        model.set_attn_implementation("eager")
    if why == "checkpointed":
        enable_checkpointing(model)
        policy_terms(model, batch(ROWS), temperature=1.0).logp.sum().backward()
    else:
        HFEngine(model, tiny.byte_tokenizer(64)).generate([[5, 9, 7]], [[1, 2]], SamplingOptions(max_tokens=3))
    assert calls == []


def test_an_error_leaves_the_model_as_it_was():
    model = tiny.llama()
    with pytest.raises(RuntimeError), short.short_attention(model):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"
    assert choose(model) is CachedDecoder
