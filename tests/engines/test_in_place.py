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


@pytest.mark.parametrize("least", [0, 3], ids=["in place", "then copied"])
@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama, tiny.qwen3, tiny.gemma])
@pytest.mark.parametrize("owner", [[0, 0, 0, 1, 1, 2], [2, 0, 1, 0, 2, 0]], ids=["in order", "mixed"])
def test_equals_a_plain_forward(make, owner, least, monkeypatch):
    """Rows leave before the first token and later; a prompt whose rows are all gone is forgotten."""
    monkeypatch.setattr(in_place, "LEAST_ROWS_SAMPLING", least)
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
                copied = bool(least and t)
                assert (decoder.prefix is None) == copied
                if not copied:
                    assert decoder.prefix.owners.prefixes == len(owner[live].unique())
            ids = (live * 7 + 3 * t) % 60
            assert torch.allclose(decoder.step(ids), plain.step(ids), atol=1e-6)
    held = decoder.cache.layers[0].keys
    assert held.shape[2] == 9 + (len(LONG) if least else 0)  # the rows' own tokens only, until they are copies
    assert model.config._attn_implementation == "sdpa"


def test_a_prompt_with_most_of_the_rows_is_copied():
    """Three prompts, five rows of one: twelve places and more would stay empty."""
    model = tiny.llama(dtype=torch.float64)
    owner = torch.tensor([0] * 5 + [1] * 5 + [2] * 5)
    decoder, plain = InPlaceDecoder(model), UncachedDecoder(model)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 10])
    with torch.inference_mode():
        for d in (decoder, plain):
            d.start([LONG, SHORT, OTHER], owner)
            d.step(torch.arange(15))
            d.keep(rows)
        assert decoder.prefix is None
        assert torch.allclose(decoder.step(torch.arange(7)), plain.step(torch.arange(7)), atol=1e-6)


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

    def kind(lengths, rows, first=CachedDecoder, model=model):
        owner = torch.repeat_interleave(torch.tensor(rows))
        return type(in_place_if_it_pays(model, first, lengths, owner))

    assert kind([300, 20], [4, 4]) is InPlaceDecoder
    assert kind([300, 20], [4, 3]) is CachedDecoder
    assert kind([255, 20], [4, 4]) is CachedDecoder
    assert kind([300, 20, 20], [20, 2, 2]) is CachedDecoder  # 60 places for 24 rows
    assert kind([300, 20], [4, 4], PlainCachedDecoder) is PlainCachedDecoder
    model.set_attn_implementation("eager")
    assert kind([300, 20], [4, 4]) is CachedDecoder
    assert kind([300], [8], model=tiny.falcon()) is CachedDecoder  # attends in its own way
