"""Samples that read their prompt's keys in place are those of the plain decoder."""

import itertools

import pytest
import tiny
import torch

from kenpo.engines import in_place
from kenpo.engines.base import SamplingOptions
from kenpo.engines.decoding import CachedDecoder, PlainCachedDecoder, UncachedDecoder
from kenpo.engines.hf import HFEngine
from kenpo.engines.in_place import InPlaceDecoder, in_place_if_it_pays

LONG, SHORT, OTHER = list(range(5, 35)), list(range(30, 37)), list(range(8, 30, 2))


@pytest.fixture
def always(monkeypatch):
    """In place however short the prompt and few the rows."""
    monkeypatch.setattr(in_place, "LEAST_PROMPT_SAMPLING", 1)
    monkeypatch.setattr(in_place, "LEAST_ROWS_SAMPLING", 1)


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama, tiny.qwen3, tiny.gemma])
@pytest.mark.parametrize("owner", [[0, 0, 0, 1, 1, 2], [2, 0, 1, 0, 2, 0]], ids=["in order", "mixed"])
def test_equals_a_plain_forward(make, owner):
    """Rows leave before the first token and later; a prompt whose rows are all gone is forgotten."""
    model = make(dtype=torch.float64)
    decoder, plain = InPlaceDecoder(model), UncachedDecoder(model)
    owner = torch.tensor(owner)
    with torch.inference_mode():
        first = [d.start([LONG, SHORT, OTHER], owner) for d in (decoder, plain)]
        assert torch.allclose(*first, atol=1e-6)
        live = torch.arange(6)
        for t in range(9):
            if t in (0, 3, 6):
                rows = {0: owner != 9, 3: owner != 1, 6: owner == 2}[t][live].nonzero().squeeze(1)
                live = live[rows]
                decoder.keep(rows)
                plain.keep(rows)
                if t:
                    assert decoder.prefix.owners.prefixes == len(owner[live].unique())
            ids = (live * 7 + 3 * t) % 60
            assert torch.allclose(decoder.step(ids), plain.step(ids), atol=1e-6)
    held = decoder.cache.layers[0].keys
    assert held.shape[2] == 9  # the rows' own tokens only
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("options", [SamplingOptions(max_tokens=12), SamplingOptions(max_tokens=12, top_k=9)])
def test_the_engine_draws_the_same_samples(options, always, monkeypatch):
    model, tokenizer = tiny.qwen3(300), tiny.byte_tokenizer()
    model.generation_config.eos_token_id = list(range(0, 300, 9))
    made = []
    start = InPlaceDecoder.start
    monkeypatch.setattr(InPlaceDecoder, "start", lambda self, *a: made.append(1) or start(self, *a))
    seeds = [[10 * p + s for s in range(6)] for p in range(3)]
    prompts = [LONG, SHORT, OTHER]
    got = HFEngine(model, tokenizer).generate(prompts, seeds, options)
    assert made
    monkeypatch.setattr(in_place, "LEAST_PROMPT_SAMPLING", 10**9)
    want = HFEngine(model, tokenizer).generate(prompts, seeds, options)
    for a, b in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        assert a.tokens == b.tokens
        assert a.logp == pytest.approx(b.logp, abs=1e-5)


def test_it_is_taken_where_it_pays(monkeypatch):
    model = tiny.llama()
    kind = lambda lengths, rows, first=CachedDecoder: type(in_place_if_it_pays(model, first, lengths, rows))  # noqa: E731
    assert kind([300, 20], 8) is InPlaceDecoder
    assert kind([300, 20], 7) is CachedDecoder
    assert kind([255, 20], 8) is CachedDecoder
    assert kind([300, 20], 8, PlainCachedDecoder) is PlainCachedDecoder
    model.set_attn_implementation("eager")
    assert kind([300, 20], 8) is CachedDecoder
    assert type(in_place_if_it_pays(tiny.falcon(), CachedDecoder, [300], 8)) is CachedDecoder  # attends in its own way
