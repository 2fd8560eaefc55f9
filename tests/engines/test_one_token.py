"""One token's attention gives what torch's fused attention gives, and models that use something else keep it."""

from __future__ import annotations

import pytest
import tiny
import torch

from kenpo.engines import one_token
from kenpo.engines.base import SamplingOptions
from kenpo.engines.decoding import CachedDecoder, UncachedDecoder, choose
from kenpo.engines.hf import HFEngine


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that came here."""
    seen = []
    attend = one_token._attend
    monkeypatch.setattr(
        one_token, "_attend", lambda m, q, *rest, **more: seen.append(q.shape) or attend(m, q, *rest, **more)
    )
    one_token._register.cache_clear()
    yield seen
    one_token._register.cache_clear()


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3, tiny.gpt2, tiny.gemma])
@pytest.mark.parametrize("prompts", [[[5, 9, 7], [4, 8]], [[5, 9, 7], [4, 8, 3]]], ids=["padded", "level"])
def test_equals_a_plain_forward(make, prompts, calls):
    model = make(dtype=torch.float64)
    decoder, plain = CachedDecoder(model), UncachedDecoder(model)
    owner = torch.tensor([0, 0, 1])
    with torch.no_grad():
        for d in (decoder, plain):
            d.start(prompts, owner)
        for t in range(4):
            ids = torch.tensor([3 + t, 9, 11 + t])
            assert torch.allclose(decoder.step(ids), plain.step(ids), atol=1e-6)
    assert calls
    assert all(shape[2] == 1 for shape in calls)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("why", ["eager", "bfloat16"])
def test_other_attention_and_low_precision_keep_theirs(why, calls):
    model = tiny.llama(dtype=torch.bfloat16 if why == "bfloat16" else torch.float32)
    if why == "eager":
        model.set_attn_implementation("eager")
    HFEngine(model, tiny.byte_tokenizer(64)).generate([[5, 9, 7]], [[1, 2]], SamplingOptions(max_tokens=3))
    assert calls == []


def test_an_error_leaves_the_model_as_it_was():
    model = tiny.llama()
    with pytest.raises(RuntimeError), one_token.one_token_attention(model):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa"
    assert choose(model) is CachedDecoder
