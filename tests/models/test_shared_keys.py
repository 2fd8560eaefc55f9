"""Rows that read a prompt's keys where they lie have the log-probs and gradients of rows that hold a copy."""

from __future__ import annotations

import threading

import pytest
import tiny
import torch

from kenpo.engines.decoding import fault
from kenpo.engines.in_place import InPlaceDecoder
from kenpo.models import shared_keys, shared_prompt
from kenpo.models.head import find_head
from kenpo.models.policy import policy_terms
from models.test_shared_prompt import ROWS, batch, unshared, value_and_gradient


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Share from the first token saved on, and in place however short the prompt."""
    monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", 1)
    monkeypatch.setattr(shared_keys, "LEAST_PROMPT", 1)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that came here."""
    seen, attention = [], shared_keys.prefix_attention

    def watch(query, *rest, **more):
        seen.append(query.shape)
        return attention(query, *rest, **more)

    monkeypatch.setattr(shared_keys, "prefix_attention", watch)
    return seen


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        (tiny.gpt2, torch.float64, 1e-10),
        (tiny.llama, torch.float64, 1e-6),
        (tiny.qwen3, torch.float64, 1e-6),
        (tiny.gemma, torch.float64, 1e-6),
        (tiny.cohere, torch.float64, 1e-6),
        (tiny.qwen3, torch.float32, 1e-5),
        (tiny.llama, torch.bfloat16, 0.15),  # that much is bf16's own rounding: plain rows are 0.05 from float32
    ],
)
@pytest.mark.parametrize("rows", [ROWS, ROWS[:4], ROWS[2:]], ids=["two prompts", "one", "uneven"])
@pytest.mark.parametrize("holes", [False, True])
def test_equals_every_row_with_its_own_prompt(make, dtype, tolerance, rows, holes, monkeypatch, calls):
    model, rollouts = make(dtype=dtype), batch(rows, holes=holes)
    plain = unshared(model, rollouts, monkeypatch)
    assert calls == []
    got = value_and_gradient(model, rollouts)
    assert calls
    assert torch.allclose(got[0], plain[0], rtol=0, atol=min(tolerance * 10, 0.1))
    assert float((got[1] - plain[1]).norm() / plain[1].norm()) < tolerance
    assert model.config._attn_implementation == "sdpa"


def test_short_prompts_are_copied(monkeypatch, calls):
    monkeypatch.setattr(shared_keys, "LEAST_PROMPT", 20)
    value_and_gradient(tiny.llama(), batch())
    assert calls == []
    monkeypatch.setattr(shared_keys, "LEAST_PROMPT", 19)  # the last token of a prompt stays with the row
    value_and_gradient(tiny.llama(), batch())
    assert calls


def test_the_rule():
    def pays(*families):
        return shared_prompt.in_place_pays([shared_prompt.Family(list(range(n)), prompt) for n, prompt in families])

    assert pays((2, 1))
    assert pays((8, 1), (2, 1), (2, 1))  # 24 places for 12 rows
    assert not pays((9, 1), (2, 1), (2, 1))


def eager():
    model = tiny.llama()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("make", "why"), [(eager, "eager"), (tiny.falcon, "not get what the cache holds"), (tiny.llama, "under scaling")]
)
def test_other_attentions_copy_and_agree(make, why, monkeypatch, calls):
    if make is tiny.llama:  # as if a scaling were something that the attention knows nothing of
        monkeypatch.setattr(shared_keys, "FOREIGN", ("scaling",))
    model, rollouts = make(), batch()
    assert why in shared_prompt.why_copied(model, find_head(model).decoder)
    calls.clear()
    plain = unshared(model, rollouts, monkeypatch)
    got = value_and_gradient(model, rollouts)
    assert calls == []
    assert torch.allclose(got[0], plain[0], atol=1e-5)
    assert float((got[1] - plain[1]).norm() / plain[1].norm()) < 1e-5


def test_adapters(monkeypatch, calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model, rollouts = peft.get_peft_model(tiny.llama(dtype=torch.float64), config), batch()
    plain = unshared(model, rollouts, monkeypatch)
    got = value_and_gradient(model, rollouts)
    assert calls
    assert float((got[1] - plain[1]).norm() / plain[1].norm()) < 1e-6


def test_an_error_inside_leaves_the_model_as_it_was():
    model = tiny.llama()
    decoder, rollouts = find_head(model).decoder, batch()
    policy_terms(model, rollouts, temperature=1.0)
    hook = decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy_terms(model, rollouts, temperature=1.0)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert shared_keys._now.get() is None


def silent(model):
    """Attention adds nothing to the states, so that no output tells what it reads."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return model


@pytest.mark.parametrize("times", [0, 2])
def test_what_a_layer_reads_is_counted_not_believed(times):
    """Outputs can't tell in a fresh model of zero output projections; a wrong attention would show once it trains."""
    model = silent(tiny.llama())
    assert shared_prompt.why_copied(model, find_head(model).decoder) is None
    model = silent(tiny.llama())
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def odd(hidden_states, **options):
        if any(options.get(name) is not None for name in ("cache", "past_key_values")):
            return plain(hidden_states, **options)
        return [plain(hidden_states, **options) for _ in range(times)][-1] if times else (hidden_states * 0, None)

    attention.forward = odd
    assert f"layer 1 are read {times} times" in shared_prompt.why_copied(model, find_head(model).decoder)


@pytest.mark.parametrize("change", ["repeats", "scales"])
def test_keys_that_change_behind_the_cache_are_noticed(change):
    """As JetMoe does: what the attention gets is not what the cache holds. Outputs can't tell here either."""
    model = silent(tiny.llama())

    def changed(key, value):
        return (key.repeat_interleave(2, 2), value.repeat_interleave(2, 2)) if change == "repeats" else (2 * key, value)

    for layer in model.model.layers:
        _behind_the_cache(layer.self_attn, changed)
    assert "does not get what the cache holds" in shared_prompt.why_copied(model, find_head(model).decoder)


def _behind_the_cache(attention, change):
    """Make `attention` change keys and values once they have been cached."""
    plain = attention.forward

    class Changing:
        def __init__(self, cache):
            self.cache = cache

        def update(self, *args, **options):
            return change(*self.cache.update(*args, **options))

    def forward(hidden_states, **options):
        name = next((n for n in ("cache", "past_key_values") if options.get(n) is not None), None)
        return plain(hidden_states, **(options | ({name: Changing(options[name])} if name else {})))

    attention.forward = forward


def test_nan_is_no_agreement(monkeypatch):
    attention = shared_keys.prefix_attention
    monkeypatch.setattr(shared_keys, "prefix_attention", lambda *a, **k: attention(*a, **k) * torch.nan)
    model = tiny.llama()
    assert "nan" in shared_prompt.why_copied(model, find_head(model).decoder)
    assert "nan" in fault(model, InPlaceDecoder)


def test_float64_under_autocast(calls):
    model, rollouts = tiny.llama(dtype=torch.float64), batch()
    plain = value_and_gradient(model, rollouts)
    calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = value_and_gradient(model, rollouts)
    assert calls
    assert torch.allclose(got[1], plain[1])


def test_another_thread_may_run_the_model(monkeypatch):
    """It finds the configuration changed, and attends as usual, with its own padding masked."""
    model, rollouts = tiny.llama(dtype=torch.float64), batch()
    policy_terms(model, rollouts, temperature=1.0)  # the trials are behind us
    ids, mask = torch.tensor([[3, 4, 5, 6], [1, 1, 7, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    want, got = model(ids, attention_mask=mask).logits, []
    attention = shared_keys.prefix_attention

    def meanwhile(*args, **options):
        if not got:
            thread = threading.Thread(target=lambda: got.append(model(ids, attention_mask=mask).logits))
            thread.start()
            thread.join()
        return attention(*args, **options)

    monkeypatch.setattr(shared_keys, "prefix_attention", meanwhile)
    policy_terms(model, rollouts, temperature=1.0)
    assert torch.allclose(got[0], want)
