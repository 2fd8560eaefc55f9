"""Packed rows give the log-probs and gradients of padded ones, and no token of padding runs."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from scoring import policy_backward, policy_terms
from transformers import AttentionInterface

from kenpo.errors import InputError, UnknownNameError
from kenpo.models import shared_prompt
from kenpo.models.loading import load_model
from models.test_shared_prompt import ROWS, batch, value_and_gradient

TOKENS = sum(len(prompt) + len(response) - 1 for prompt, response in ROWS)  # the last one predicts nothing


def alike(found, right, tolerance):
    assert torch.allclose(found[0], right[0], rtol=0, atol=tolerance * 10)
    assert float((found[1] - right[1]).norm() / right[1].norm()) < tolerance


@pytest.fixture
def widths(monkeypatch):
    """Shapes of the ids that ran through any model's embedding."""
    seen = []
    run = torch.nn.functional.embedding

    def watch(ids, weight, *rest, **more):
        if weight.shape[0] == 64 and weight.requires_grad:
            seen.append(tuple(ids.shape))
        return run(ids, weight, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "embedding", watch)
    return seen


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"),
    [
        (tiny.gpt2, torch.float64, 1e-10),
        (tiny.llama, torch.float64, 1e-6),
        (tiny.qwen3, torch.float64, 1e-6),
        (tiny.mistral, torch.float64, 1e-6),
        (tiny.gemma, torch.float64, 1e-6),
        (tiny.llama, torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize(("left", "holes"), [(False, False), (True, True)])
def test_equals_padded_rows(make, dtype, tolerance, attention, left, holes):
    model, rollouts = make(dtype=dtype), batch(left=left, holes=holes)
    model.set_attn_implementation(attention)
    alike(value_and_gradient(model, rollouts, "on"), value_and_gradient(model, rollouts, "off"), tolerance)


def test_sliding_windows_and_soft_caps():
    model, rollouts = tiny.gemma2(dtype=torch.float64), batch()
    alike(value_and_gradient(model, rollouts, "on"), value_and_gradient(model, rollouts, "off"), 1e-6)


def test_no_token_of_padding_runs(widths):
    model = tiny.llama(dtype=torch.float64)
    model.get_input_embeddings().weight.requires_grad_()
    value_and_gradient(model, batch(), "on")
    assert widths[-1] == (1, TOKENS)
    value_and_gradient(model, batch(), "off")
    assert widths[-1][0] == len(ROWS)


def test_rows_beside_shared_prompts_are_packed(monkeypatch):
    model, rollouts = tiny.gpt2(dtype=torch.float64), batch()
    plain = value_and_gradient(model, rollouts, "off")
    monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", 1)
    alike(value_and_gradient(model, rollouts, "on"), plain, 1e-10)


def test_the_fused_path_takes_packed_rows():
    model, rollouts = tiny.llama(dtype=torch.float64), batch()
    found = []
    for packing in ("off", "on"):
        model.zero_grad()
        policy_backward(
            model, rollouts, lambda rows, policy, measure: {"logp": policy.logp.sin()},
            temperature=0.8, packing=packing, chunk=5,
        )  # fmt: skip
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


def test_checkpointed_layers_and_a_reference():
    model, rollouts = tiny.gpt2(dtype=torch.float64), batch()
    reference = tiny.gpt2(dtype=torch.float64, seed=1).requires_grad_(False)
    with torch.no_grad():
        kl = [
            policy_terms(
                model, rollouts, temperature=0.8, want=frozenset({"kl_ref"}), reference=reference, packing=p
            ).kl_ref
            for p in ("off", "on")
        ]
    assert float(kl[0].sum()) > 0
    assert torch.allclose(*kl, atol=1e-10)
    plain = value_and_gradient(model, rollouts, "off")
    alike(value_and_gradient(model, rollouts, "on", checkpointing=True), plain, 1e-10)


def attention_by_rows(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **_):
    """What a variable-length kernel computes: rows told by their positions, no mask, nothing between rows."""
    assert attention_mask is None or attention_mask.dim() == 2
    assert query.shape[0] == 1
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    starts = [*(position_ids[0] == 0).nonzero().squeeze(1).tolist(), query.shape[2]]
    rows = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling
        )
        for a, b in itertools.pairwise(starts)
    ]
    return torch.cat(rows, 2).transpose(1, 2), None


def test_a_variable_length_kernel_gets_packed_rows_by_itself(widths):
    AttentionInterface.register("flash_by_rows", attention_by_rows)
    model, rollouts = tiny.llama(dtype=torch.float64), batch()
    plain = value_and_gradient(model, rollouts, "auto")
    assert widths[-1][0] == len(ROWS)  # sdpa: padded
    model.config._attn_implementation = "flash_by_rows"
    alike(value_and_gradient(model, rollouts, "auto"), plain, 1e-6)
    assert widths[-1] == (1, TOKENS)


def test_a_model_without_positions_is_refused_by_name():
    with pytest.raises(InputError, match=r"BloomForCausalLM can't run packed rows.*position_ids"):
        policy_terms(tiny.bloom(), batch(), temperature=1.0, packing="on")
    with pytest.raises(UnknownNameError, match="packing"):
        policy_terms(tiny.gpt2(), batch(), temperature=1.0, packing="sometimes")


def test_attention_is_chosen_by_name():
    model, _ = load_model("bundled", attention="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UnknownNameError, match="sdpa"):
        load_model("bundled", attention="sdp")
    with pytest.raises(InputError, match="on a GPU in bfloat16"):
        load_model("bundled", attention="flash_attention_2")


def test_the_proof_does_not_depend_on_autocast():
    model, rollouts = tiny.llama(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = policy_terms(model, rollouts, temperature=1.0, packing="on").logp
    assert torch.allclose(found, policy_terms(model, rollouts, temperature=1.0).logp, atol=0.2)
