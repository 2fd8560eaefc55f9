"""Adapters: what is trained, what the reference is, what is saved; a head of higher precision."""

import json

import pytest
import tiny
import torch
from scoring import policy_terms

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.errors import InputError
from kenpo.models import lora
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.models.wide_head import widen_head
from kenpo.runs.checkpoint import save_model
from kenpo.types import Rollouts


@pytest.fixture
def base(tmp_path):
    """A model folder."""

    def make(kind=tiny.llama, **kw):
        folder = tmp_path / "base"
        kind(vocab=300, **kw).save_pretrained(folder)
        tiny.byte_tokenizer().save_pretrained(folder)
        return folder

    return make


def batch():
    tokens = torch.tensor([[5, 9, 7, 11, 12, 2], [5, 9, 7, 21, 22, -1]])
    mask = tokens >= 0
    mask[:, :3] = False
    return Rollouts(tokens=tokens, mask=mask, group=torch.zeros(2, dtype=torch.long), rewards=torch.zeros(2))


def logp(model):
    return (model if isinstance(model, Scorer) else Scorer(model)).terms(batch()).logp


def shake(model, scale=0.3):
    """Move what is trainable, as training would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += scale * torch.randn_like(p)


def test_a_fresh_adapter_changes_nothing_and_is_all_that_is_trained(base):
    model, _ = load_model(base())
    before = logp(model)
    names = {n for n, _ in model.named_parameters()}
    lora.add_adapter(model, 4, alpha=8)
    assert torch.equal(logp(model), before)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in n for n in trained)
    assert not any("lm_head" in n for n in trained)
    assert {n.replace(".base_layer", "") for n, p in model.named_parameters() if not p.requires_grad} == names
    policy_terms(model, batch(), temperature=1.0).logp.sum().backward()
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())


def test_the_reference_of_a_fresh_adapter_is_the_base(base):
    model, _ = load_model(base())
    before = logp(model)
    lora.add_adapter(model, 4, alpha=8)
    reference = Scorer(model).frozen()
    shake(model)
    assert not torch.equal(logp(model), before)
    assert torch.equal(logp(reference), before)
    assert [p.requires_grad for n, p in model.named_parameters() if ".lora_" in n].count(False) == 0


@pytest.mark.parametrize("kind", [tiny.llama, tiny.gpt2])
def test_the_reference_of_a_trained_adapter_is_that_adapter(base, tmp_path, kind):
    """A policy that starts as base and adapter has KL 0 to its reference, not KL(sig 3 || sig 2)."""
    model, tokenizer = load_model(base(kind))
    plain = logp(model)
    lora.add_adapter(model, 4, alpha=8)
    shake(model)
    start = logp(model)
    lora.save_adapter(model, tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    model, _ = load_model(tmp_path / "adapter")
    reference = Scorer(model).frozen()
    assert torch.equal(logp(model), start)
    assert torch.equal(logp(reference), start)
    assert not torch.allclose(start, plain)
    policy = policy_terms(model, batch(), temperature=1.0, want=frozenset({"kl_ref"}), reference=reference)
    assert float(policy.kl_ref.detach().abs().max()) < 1e-6
    (policy.logp + policy.kl_ref).sum().backward()
    for name, p in model.named_parameters():
        assert p.requires_grad == (".default." in name)
        assert (p.grad is not None) == (".default." in name)
    shake(model)
    assert not torch.equal(logp(model), start)
    assert torch.equal(logp(reference), start)
    lora.save_adapter(model, tmp_path / "second")
    moved = logp(model)
    assert torch.equal(logp(load_model(tmp_path / "second")[0]), moved)


@pytest.mark.parametrize("kind", [tiny.llama, tiny.gpt2])
def test_merged_folders_open_without_peft_and_leave_the_model_alone(base, tmp_path, kind):
    model, tokenizer = load_model(base(kind), dtype="float64")
    lora.add_adapter(model, 4, alpha=8)
    shake(model)
    state = {n: p.clone() for n, p in model.state_dict().items()}
    save_model(tmp_path / "merged", model, tokenizer)
    assert all(torch.equal(state[n], p) for n, p in model.state_dict().items())
    assert not list((tmp_path / "merged").glob("adapter*"))
    merged, _ = load_model(tmp_path / "merged", dtype="float64")
    assert not lora.is_adapted(merged)
    assert torch.allclose(logp(merged), logp(model), atol=1e-10)


def test_the_engine_samples_with_the_adapter_on(base):
    model, tokenizer = load_model(base())
    lora.add_adapter(model, 4, alpha=8)
    engine = HFEngine(model, tokenizer)
    requests = [Request((5, 9, 7), seed, SamplingOptions(max_tokens=6)) for seed in (1, 2)]
    before = engine.sample(requests)
    shake(model)
    after = engine.sample(requests)
    assert [c.tokens for c in after] != [c.tokens for c in before]
    tokens = torch.tensor([[5, 9, 7, *after[0].tokens]])
    mask = torch.arange(tokens.shape[1])[None] >= 3
    rollouts = Rollouts(tokens=tokens, mask=mask, group=torch.zeros(1, dtype=torch.long), rewards=torch.zeros(1))
    with torch.no_grad():
        trainer = policy_terms(model, rollouts, temperature=1.0).logp[mask]
    assert trainer.tolist() == pytest.approx(after[0].logp, abs=1e-5)


def test_wrong_adapters_are_named(base, tmp_path):
    folder = base()
    for targets, what in ((("nowhere",), "nowhere"), (("lm_head",), "output head")):
        with pytest.raises(InputError, match=what):
            lora.add_adapter(load_model(folder)[0], 4, alpha=8, targets=targets)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    with pytest.raises(InputError, match="PREFIX_TUNING"):
        load_model(tmp_path / "odd")
    for bias in ({"lora_bias": True}, {"bias": "lora_only"}):
        (tmp_path / "odd" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **bias}))
        with pytest.raises(InputError, match="biases of its own"):
            load_model(tmp_path / "odd")
    (tmp_path / "odd" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="names no base model"):
        load_model(tmp_path / "odd")


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_on_a_bfloat16_model(tied):
    """Logits of the widened head are float32; body and embedding output stay bfloat16; engine and trainer agree."""
    model = tiny.llama(vocab=300, dtype=torch.bfloat16, tie_word_embeddings=tied)
    narrow = logp(model)
    widen_head(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert (model.get_input_embeddings().weight is model.lm_head.weight) == tied
    ids = torch.tensor([[5, 9, 7]])
    assert model.model(ids).last_hidden_state.dtype == torch.bfloat16
    assert model(ids).logits.dtype == torch.float32
    wide = logp(model)
    assert torch.allclose(wide, narrow, atol=0.1)
    assert not torch.equal(wide, narrow)
    own = model(ids).logits[0].log_softmax(-1)
    assert float(wide[0, 3]) == pytest.approx(float(own[2, 11].detach()), abs=1e-5)
    policy_terms(model, batch(), temperature=1.0).logp.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
