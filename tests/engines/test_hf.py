"""The embedded engine: exact log-probs, reproducible samples, ends of responses, and the corners."""

import warnings

import pytest
import tiny
import torch
from scoring import policy_terms

from kenpo.engines import decoding
from kenpo.engines.base import Request, SamplingOptions
from kenpo.errors import InputError, NonFiniteError
from kenpo.types import Rollouts

from .nested import HFEngine

PROMPTS = [[40], [6, 7, 8, 9, 10, 11, 12], [5, 6, 7], [5, 6, 8]]
SEEDS = [[1, 2, 3, 4], [1, 2], [9], []]
FULL = SamplingOptions(max_tokens=12)
CUT = SamplingOptions(max_tokens=12, temperature=0.7, top_k=9, top_p=0.8)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.byte_tokenizer()


def scripted(script, prompt_length, **options):
    """A model that all but surely says the given tokens after a prompt of that length."""
    model = tiny.llama(300, **options)
    table = torch.full((64,), 5)
    table[prompt_length - 1 : prompt_length - 1 + len(script)] = torch.tensor(script)
    plain = model.forward

    def forward(
        input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, past_key_values=None
    ):
        past = {"cache": cache} if past_key_values is None else {"past_key_values": past_key_values}
        out = plain(input_ids, attention_mask, position_ids, use_cache=use_cache, **past)
        at = torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
        out.logits = out.logits.scatter(-1, table[at].expand(input_ids.shape)[..., None], 1000.0)
        return out

    model.forward = forward
    return model


def as_rollouts(prompts, completions):
    rows = [(p, c) for p, cs in zip(prompts, completions, strict=True) for c in cs]
    width = max(len(p) + len(c.tokens) for p, c in rows)
    fill = [width - len(p) - len(c.tokens) for p, c in rows]
    fields = {}
    if rows[0][1].support is not None:
        k = max(len(s) for _, c in rows for s in c.support)
        fields["support_ids"] = torch.tensor([
            [[-1] * k] * len(p) + [s + [-1] * (k - len(s)) for s in c.support] + [[-1] * k] * f
            for (p, c), f in zip(rows, fill, strict=True)
        ])  # fmt: skip
    return Rollouts(
        tokens=torch.tensor([p + c.tokens + [-1] * f for (p, c), f in zip(rows, fill, strict=True)]),
        mask=torch.tensor(
            [[0] * len(p) + [1] * len(c.tokens) + [0] * f for (p, c), f in zip(rows, fill, strict=True)]
        ).bool(),
        logp_sampler=torch.tensor([[0.0] * len(p) + c.logp + [0.0] * f for (p, c), f in zip(rows, fill, strict=True)]),
        group=torch.arange(len(rows)),
        rewards=torch.zeros(len(rows)),
        **fields,
    )


def gap(model, prompts, completions, temperature):
    batch = as_rollouts(prompts, completions)
    with torch.no_grad():
        terms = policy_terms(model, batch, temperature=temperature)
    return float((terms.logp - batch.logp_sampler)[batch.mask].abs().max())


@pytest.mark.parametrize(
    "make", [tiny.gpt2, tiny.llama, tiny.qwen3, tiny.gemma2, tiny.cohere, tiny.mistral, tiny.bloom]
)
@pytest.mark.parametrize("options", [FULL, CUT], ids=["full", "truncated"])
@pytest.mark.filterwarnings("ignore:BloomForCausalLM")
def test_sampler_and_trainer_agree(make, options, tokenizer):
    model = make(300)
    found = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, options)
    assert [len(row) for row in found] == [4, 2, 1, 0]
    assert gap(model, PROMPTS, found, options.temperature) < 2e-5


@pytest.mark.parametrize("options", [FULL, CUT], ids=["full", "truncated"])
def test_a_sample_depends_on_weights_prompt_seed_and_options_only(options, tokenizer):
    model = tiny.qwen3(300)
    together = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, options)
    torch.manual_seed(99)
    for budget in (1, 40, 100):
        other = HFEngine(model, tokenizer, batch_tokens=budget).generate(PROMPTS[::-1], SEEDS[::-1], options)[::-1]
        assert [[c.tokens for c in row] for row in other] == [[c.tokens for c in row] for row in together]
    for p, row in enumerate(together):
        for s, completion in enumerate(row):
            alone = HFEngine(model, tokenizer).generate([PROMPTS[p]], [[SEEDS[p][s]]], options)[0][0]
            assert alone.tokens == completion.tokens
            assert alone.logp == pytest.approx(completion.logp, abs=1e-5)
    assert together[0][0].tokens != together[0][1].tokens


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.qwen3, tiny.gemma2])
def test_rows_that_are_done_leave_without_a_trace(make, tokenizer):
    """Many ends of sequence, so that rows finish at all times; each must be what it is alone."""
    model = make(300)
    model.generation_config.eos_token_id = list(range(0, 300, 6))
    seeds = [[10 * p + s for s in range(8)] for p in range(4)]
    for options in (SamplingOptions(max_tokens=20), SamplingOptions(max_tokens=20, top_k=50)):
        found = HFEngine(model, tokenizer).generate(PROMPTS, seeds, options)
        lengths = {len(c.tokens) for row in found for c in row}
        assert len(lengths) > 4
        assert gap(model, PROMPTS, found, 1.0) < 2e-5
        for p, row in enumerate(found):
            for s, completion in enumerate(row):
                alone = HFEngine(model, tokenizer).generate([PROMPTS[p]], [[seeds[p][s]]], options)[0][0]
                assert alone.tokens == completion.tokens
                assert completion.truncated == (completion.tokens[-1] % 6 != 0 and completion.tokens[-1] != 2)


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama, tiny.qwen3, tiny.gemma2, tiny.mistral, tiny.granite])
def test_the_usual_families_take_the_quick_way(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoding.choose(make(300)) is decoding.CachedDecoder


def test_the_global_generator_is_left_alone(tokenizer):
    engine = HFEngine(tiny.llama(300), tokenizer)
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    engine.generate(PROMPTS, SEEDS, FULL)
    assert torch.equal(torch.rand(4), want)


def test_the_slower_ways_give_the_same_samples(tokenizer):
    model = tiny.llama(300)
    want = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
    for kind in (decoding.PlainCachedDecoder, decoding.UncachedDecoder):
        decoding._chosen[model] = kind
        got = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
        assert [[c.tokens for c in row] for row in got] == [[c.tokens for c in row] for row in want]


@pytest.mark.parametrize("fault", ["refuses", "forgets"])
def test_a_cache_that_can_not_share_is_noticed_aloud(fault, tokenizer, monkeypatch):
    from transformers import DynamicCache

    def reorder(self, index):
        if fault == "refuses":
            raise NotImplementedError("this cache can't be reordered")
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[index] * 0, layer.values[index]

    model = tiny.llama(300)
    want = HFEngine(tiny.llama(300), tokenizer).generate(PROMPTS, SEEDS, FULL)
    monkeypatch.setattr(DynamicCache, "reorder_cache", reorder)
    with pytest.warns(UserWarning, match="LlamaForCausalLM: sampling uses a cache without shared prefill"):
        got = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
    assert [[c.tokens for c in row] for row in got] == [[c.tokens for c in row] for row in want]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)


def test_a_model_with_recurrent_layers_and_a_mixture_of_experts(tokenizer):
    shape = {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    recurrent = tiny._llama_style("Lfm2ForCausalLM", "Lfm2Config", 300, torch.float32, 0, **shape)
    shape = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    experts = tiny._llama_style("MixtralForCausalLM", "MixtralConfig", 300, torch.float32, 0, **shape)
    for model in (recurrent, experts):
        got = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
        assert gap(model, PROMPTS, got, 1.0) < 2e-5


def test_a_model_with_adapters(tokenizer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.llama(300), config)
    got = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, CUT)
    assert gap(model, PROMPTS, got, CUT.temperature) < 2e-5
    policy_terms(model, as_rollouts(PROMPTS, got), temperature=0.7).logp.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def test_greedy_takes_the_likeliest(tokenizer):
    model = tiny.gpt2(300)
    got = HFEngine(model, tokenizer).generate([PROMPTS[1]], [[5, 6]], CUT, greedy=True)[0]
    ids = list(PROMPTS[1])
    for token in got[0].tokens:
        assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
    assert got[0].tokens == got[1].tokens
    assert got[0].support is None


def test_a_response_that_meets_the_limit_keeps_its_last_sampled_token(tokenizer):
    model = scripted([14, 15, 16, 17], 2)
    got = HFEngine(model, tokenizer).generate([[5, 6]], [[0]], SamplingOptions(max_tokens=3))[0][0]
    assert got.tokens == [14, 15, 16]
    assert got.truncated
    assert len(got.logp) == 3


@pytest.mark.parametrize("pad", [None, 2])
def test_the_end_of_sequence_stays_even_where_it_is_the_padding_id(pad, tokenizer):
    model = scripted([14, 15, 2, 2, 2], 2, pad_token_id=pad)
    tokenizer.pad_token_id = pad
    got = HFEngine(model, tokenizer).generate([[5, 6], [7, 8]], [[0, 1], [2]], SamplingOptions(max_tokens=5))
    tokenizer.pad_token_id = None
    for row in got:
        for completion in row:
            assert completion.tokens == [14, 15, 2]
            assert not completion.truncated
            assert completion.text == tokenizer.decode([14, 15])


def test_every_end_of_sequence_id_stops(tokenizer):
    model = scripted([14, 77, 15, 2], 2)
    model.generation_config.eos_token_id = [88, 77]
    got = HFEngine(model, tokenizer).generate([[5, 6]], [[0]], FULL)[0][0]
    assert got.tokens == [14, 77]
    assert not got.truncated
    assert got.text == tokenizer.decode([14])


def test_the_end_as_first_sample_and_at_the_limit(tokenizer):
    model = scripted([2], 2)
    for limit in (1, 5):
        got = HFEngine(model, tokenizer).generate([[5, 6]], [[0]], SamplingOptions(max_tokens=limit))[0][0]
        assert (got.tokens, got.truncated, got.text) == ([2], False, "")


def test_stop_strings_cut_the_text_and_keep_the_tokens(tokenizer):
    script = tokenizer("so the answer is 42. and more")["input_ids"]
    model = scripted(script, 2)
    for stop in ("42.", "is 4", " answer"):
        options = SamplingOptions(max_tokens=40, stop=("never", stop))
        got = HFEngine(model, tokenizer).generate([[5, 6]], [[0, 1]], options)[0]
        n = next(i for i in range(len(script)) if stop in tokenizer.decode(script[: i + 1])) + 1
        assert got[0].tokens == got[1].tokens == script[:n]
        assert got[0].text == "so the answer is 42. and more".split(stop)[0]
        assert not got[0].truncated


def test_a_stop_string_that_is_a_special_token(tokenizer):
    model = scripted([14, 1, 15], 2)
    got = HFEngine(model, tokenizer).generate([[5, 6]], [[0]], SamplingOptions(stop=("<s>",)))[0][0]
    assert got.tokens == [14, 1]
    assert got.text == tokenizer.decode([14])


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama])
def test_responses_end_at_the_context(make, tokenizer):
    model = make(300)
    prompts = [[5] * 60, [6] * 63, [7] * 3]
    got = HFEngine(model, tokenizer).generate(prompts, [[1], [2, 3], range(4, 20)], SamplingOptions(max_tokens=30))
    for prompt, row in zip(prompts, got, strict=True):
        for c in row:
            assert len(c.tokens) <= min(30, 64 - len(prompt))
            assert c.truncated == (c.tokens[-1] != 2)
    with pytest.raises(InputError, match="request 1: 64 tokens"):
        HFEngine(model, tokenizer).generate([[5], [6] * 64], [[1], [1]], FULL)


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.qwen3])
def test_two_prompts_of_very_different_length_and_one_token_prompts(make, tokenizer):
    model = make(300)
    prompts = [[9], list(range(3, 53)), [10]]
    got = HFEngine(model, tokenizer).generate(prompts, [[1, 2], [3, 4], [5]], SamplingOptions(max_tokens=8))
    assert gap(model, prompts, got, 1.0) < 2e-5
    one = HFEngine(model, tokenizer).generate([[9]], [[1]], SamplingOptions(max_tokens=1))[0][0]
    assert one.tokens == got[0][0].tokens[:1]


def test_a_vocabulary_larger_than_the_tokenizer_and_bfloat16(tokenizer):
    model = tiny.llama(1024, dtype=torch.bfloat16)
    got = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
    assert max(t for row in got for c in row for t in c.tokens) >= len(tokenizer)
    assert gap(model, PROMPTS, got, 1.0) < 0.2
    assert all(isinstance(c.text, str) for row in got for c in row)


def test_float64_log_probs_are_exact(tokenizer):
    model = tiny.gpt2(300, dtype=torch.float64)
    got = HFEngine(model, tokenizer).generate([[5, 6, 7]], [[1]], FULL)[0][0]
    table = model(torch.tensor([[5, 6, 7, *got.tokens]])).logits[0].log_softmax(-1)
    assert got.logp == pytest.approx([table[2 + i, t].item() for i, t in enumerate(got.tokens)], abs=1e-12)


def test_nan_names_prompt_and_position(tokenizer):
    model = tiny.llama(300)
    engine = HFEngine(model, tokenizer)
    engine.generate(PROMPTS, SEEDS, FULL)
    model.lm_head.weight.data[17] = torch.nan
    with pytest.raises(NonFiniteError, match="request 0, response position 0"):
        engine.generate(PROMPTS, SEEDS, FULL)


def test_wrong_calls_are_named(tokenizer):
    engine = HFEngine(tiny.llama(300), tokenizer)
    with pytest.raises(InputError, match="request 1: id 300"):
        engine.generate([[5], [300]], [[1], [1]], FULL)
    with pytest.raises(InputError, match="request 0: it has no tokens"):
        engine.generate([[]], [[1]], FULL)
    with pytest.raises(InputError, match="batch_tokens"):
        HFEngine(tiny.llama(300), tokenizer, batch_tokens=0)
    assert engine.generate([], [], FULL) == []


def test_new_weights_are_sampled_at_once_and_stamped(tokenizer):
    model = tiny.llama(300)
    engine = HFEngine(model, tokenizer)
    before = engine.generate(PROMPTS, SEEDS, FULL)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    engine.update(lambda: iter(()), 7)
    after = engine.generate(PROMPTS, SEEDS, FULL)
    assert before[0][0].version == 0
    assert after[0][0].version == 7
    assert gap(model, PROMPTS, after, 1.0) < 2e-5
    assert gap(model, PROMPTS, before, 1.0) > 1e-2


def test_options_serve_two_calls_unchanged(tokenizer):
    options = SamplingOptions(max_tokens=8, stop=("zz",))
    engine = HFEngine(tiny.llama(300), tokenizer)
    first, second = (engine.generate(PROMPTS, SEEDS, options) for _ in range(2))
    assert options == SamplingOptions(max_tokens=8, stop=("zz",))
    assert first == second
    assert all(len(c.tokens) <= 8 and len(c.logp) == len(c.tokens) for row in second for c in row)


def test_training_mode_does_not_reach_the_samples(tokenizer):
    model = tiny.gpt2(300, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    want = HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL)
    model.train()
    assert HFEngine(model, tokenizer).generate(PROMPTS, SEEDS, FULL) == want


def test_a_cache_that_grows_in_place_holds_what_transformers_would():
    """Across its room, rows dropped in between, on a long and a short prompt."""
    from transformers import DynamicCache

    from kenpo.engines.decoding import new_cache

    model = tiny.llama(num_key_value_heads=1, max_position_embeddings=512)
    ours, theirs = new_cache(model), DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)
    rows = 4
    for n in (7, *[1] * 150):
        key, value = torch.randn((2, rows, 1, n, 16), generator=generator)
        for layer in (0, 1):
            got, want = (c.update(key + layer, value, layer) for c in (ours, theirs))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        if ours.get_seq_length() in (20, 90):
            keep = torch.arange(1, rows)
            ours.reorder_cache(keep), theirs.reorder_cache(keep)
            rows -= 1
    assert ours.get_seq_length() == theirs.get_seq_length() == 157


@pytest.mark.parametrize("options", [FULL, CUT], ids=["full", "truncated"])
def test_greedy_and_sampled_requests_stand_together(options, tokenizer):
    """One call with both is what two calls give; requests of several options and prompts may be in any order."""
    engine = HFEngine(tiny.qwen3(300), tokenizer)
    other = SamplingOptions(max_tokens=3)
    requests = [
        Request(tuple(p), s, o, g)
        for p in PROMPTS[:3] for s, o, g in ((1, options, False), (2, options, True), (3, other, False))
    ]  # fmt: skip
    together = engine.sample(requests)
    for request, episode in zip(requests, together, strict=True):
        alone = engine.sample([request])[0]
        assert episode.prompt == list(request.prompt)
        assert episode.tokens == alone.tokens
        assert episode.logp == pytest.approx(alone.logp, abs=1e-5)
        assert (episode.support is None) == (request.greedy or request.options != CUT)
    best = engine.generate([PROMPTS[0]], [[0]], options, greedy=True)[0][0]
    assert together[1].tokens == best.tokens != together[0].tokens


def test_a_weights_update_is_stamped_on_every_segment(tokenizer):
    with HFEngine(tiny.qwen3(300), tokenizer) as engine:
        assert engine.sample([Request((5,), 0, FULL)])[0].version == 0
        engine.update(lambda: iter(()), 7)
        assert engine.sample([Request((5,), 0, FULL)])[0].version == 7
    assert engine.sample([]) == []


def test_special_tokens_of_a_response_are_kept_when_asked_for(tokenizer):
    script = [1, *tokenizer("42")["input_ids"], 2]
    engine = HFEngine(scripted(script, 2), tokenizer)
    for keep, text in ((False, "42"), (True, "<s>42")):
        options = SamplingOptions(max_tokens=9, keep_special=keep)
        assert engine.generate([[5, 6]], [[0]], options)[0][0].text == text
