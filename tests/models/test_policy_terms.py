"""Log-probs and entropies from the model: alignment, padding, cuts, temperature, truncated support, altered heads."""

import math

import pytest
import tiny
import torch
from scoring import policy_terms

from kenpo.errors import InputError, MissingFieldError
from kenpo.models.head import find_head, pick_terms
from kenpo.models.loading import context_length
from kenpo.models.passes import compact
from kenpo.models.scorer import Scorer
from kenpo.types import Rollouts

ROWS = [([5, 9, 7], [11, 12, 13, 2]), ([6], [21, 22]), ([8, 9, 10, 11, 12, 13], [30, 31, 32]), ([5, 5], [2])]
ENTROPY = frozenset({"entropy"})


def rollouts(rows=ROWS, left=False, gap=0, extra=0, **fields):
    """Prompt and response rows as a batch, padded at one side; `gap` puts empty places inside each row."""
    tokens = [p + [-1] * gap + r for p, r in rows]
    masks = [[0] * (len(p) + gap) + [1] * len(r) for p, r in rows]
    width = max(map(len, tokens)) + extra

    def pad(x, v):
        return [v] * (width - len(x)) + x if left else x + [v] * (width - len(x))

    return Rollouts(
        tokens=torch.tensor([pad(t, -1) for t in tokens]),
        mask=torch.tensor([pad(m, 0) for m in masks], dtype=torch.bool),
        group=torch.zeros(len(rows), dtype=torch.long),
        rewards=torch.zeros(len(rows)),
        **fields,
    )


def plain_logp(model, prompt, response, temperature=1.0):
    """Reference: one row by itself through the model's own forward, no padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    at = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    rows = table[list(at)]
    return [float(rows[i, t]) for i, t in enumerate(response)], (-(rows.exp() * rows).sum(-1)).tolist()


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.llama, tiny.qwen3, tiny.mistral, tiny.bloom])
@pytest.mark.parametrize("left", [False, True])
def test_equals_each_row_alone_however_padded(make, left):
    model = make()
    for gap, extra in ((0, 0), (2, 3)):
        batch = rollouts(left=left, gap=gap, extra=extra)
        with torch.no_grad():
            got = policy_terms(model, batch, temperature=1.0, want=ENTROPY)
        for row, (prompt, response) in enumerate(ROWS):
            logp, entropy = plain_logp(model, prompt, response)
            assert got.logp[row][batch.mask[row]].tolist() == pytest.approx(logp, abs=1e-5)
            assert got.entropy[row][batch.mask[row]].tolist() == pytest.approx(entropy, abs=1e-5)
        assert (got.logp[~batch.mask] == 0).all()


def test_positions_count_real_tokens_with_learned_positions():
    """Left padding without mask-relative positions would score at positions [2,3,4] instead of [0,1,2]."""
    model = tiny.gpt2()
    with torch.no_grad():
        padded = policy_terms(model, rollouts([([5, 6], [7])], left=True, extra=2), temperature=1.0).logp[0, -1]
        shifted = model(torch.tensor([[5, 6]]), position_ids=torch.tensor([[2, 3]])).logits[0, -1].log_softmax(-1)[7]
    assert float(padded) == pytest.approx(plain_logp(model, [5, 6], [7])[0][0], abs=1e-5)
    assert abs(float(padded - shifted)) > 1e-3


def test_padding_side_and_order_keep_real_tokens_in_order():
    """Moving two thousand tokens with random holes to one side keeps their order."""
    torch.manual_seed(0)
    tokens = torch.arange(2000).repeat(2, 1)
    tokens[torch.rand(tokens.shape) < 0.4] = -1
    mask = tokens >= 0
    mask[torch.arange(2), mask.int().argmax(1)] = False
    batch = Rollouts(tokens=tokens, mask=mask, group=torch.zeros(2, dtype=torch.long), rewards=torch.zeros(2))
    rows = compact(batch, torch.device("cpu"), None, 2000)
    for r in range(2):
        real = tokens[r][tokens[r] >= 0]
        n = min(len(real), rows.ids.shape[1])
        assert rows.ids[r, :n].tolist() == real[:n].tolist()


def test_log_probs_stand_at_their_own_token():
    """A shift in one place only would give the ratio exp(-3+1) at the first token."""
    model = tiny.gpt2(dtype=torch.float64)
    got = policy_terms(model, rollouts([([5], [6, 7])]), temperature=1.0).logp[0]
    want = plain_logp(model, [5], [6, 7])[0]
    assert got[1:].tolist() == pytest.approx(want, abs=1e-12)
    assert (got[1:] - torch.tensor(want)).exp().tolist() == pytest.approx([1.0, 1.0])


def test_what_stands_after_the_end_of_sequence_has_no_influence():
    model = tiny.gpt2()
    one = rollouts([([5, 6], [7, 2])], extra=2)
    for fill in (-1, 9, 13):
        tokens = one.tokens.clone()
        tokens[0, 4:] = fill
        got = policy_terms(model, one.replace(tokens=tokens), temperature=1.0).logp
        assert torch.equal(got, policy_terms(model, one, temperature=1.0).logp)


@pytest.mark.parametrize(
    ("make", "dtype", "tolerance"), [(tiny.gpt2, torch.float64, 1e-12), (tiny.llama, torch.float32, 1e-5)]
)
def test_gradient_does_not_depend_on_cuts_or_padding(make, dtype, tolerance):
    model = make(dtype=dtype)
    coefficient = torch.linspace(-1, 1, 9, dtype=dtype)

    def loss(batch, rows):
        terms = policy_terms(model, batch[rows], temperature=0.7, want=ENTROPY)
        weight = torch.zeros(len(batch), batch.mask.shape[1], dtype=dtype)
        for r in range(len(batch)):
            n = int(batch.mask[r].sum())
            weight[r, batch.mask[r]] = coefficient[r : r + n] + 0.1
        return (weight[rows] * (terms.logp + 0.3 * terms.entropy)).sum()

    right = rollouts()
    whole = gradient(model, loss(right, [0, 1, 2, 3]))
    ones = gradient(model, sum(loss(right, [r]) for r in range(4)))
    three = gradient(model, loss(right, [2, 0, 3]) + loss(right, [1]))
    left = gradient(model, loss(rollouts(left=True, extra=2), [3, 2, 1, 0]))
    for other in (ones, three, left):
        assert float((other - whole).norm() / whole.norm()) < tolerance


def test_float64_stays_and_bfloat16_is_raised():
    assert policy_terms(tiny.gpt2(dtype=torch.float64), rollouts(), temperature=1.0).logp.dtype == torch.float64
    terms = policy_terms(tiny.gpt2(dtype=torch.bfloat16), rollouts(), temperature=1.0, want=ENTROPY)
    assert terms.logp.dtype == terms.entropy.dtype == torch.float32


def test_the_head_runs_only_where_a_trainable_token_is_predicted():
    model, seen = tiny.llama(), []
    scorer = Scorer(model)  # what is tried is behind us
    hook = model.lm_head.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    scorer.terms(rollouts())
    hook.remove()
    assert seen == [torch.Size([sum(len(r) for _, r in ROWS), 32])]


def test_batches_with_nothing_to_train():
    model = tiny.gpt2()
    for batch in (rollouts([([5, 6], []), ([7], [])]), rollouts()[torch.zeros(0, dtype=torch.long)]):
        terms = policy_terms(model, batch, temperature=1.0, want=ENTROPY)
        assert terms.logp.shape == terms.entropy.shape == batch.mask.shape
        assert float(gradient(model, terms.logp.sum() + terms.entropy.sum()).abs().max()) == 0.0


def test_training_mode_is_switched_off_so_that_dropout_is_no_part_of_the_policy():
    model = tiny.gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    scorer = Scorer(model)
    calm = scorer.terms(rollouts()).logp
    model.train()
    assert torch.equal(scorer.terms(rollouts()).logp, calm)


@pytest.mark.parametrize("make", [tiny.gemma2, tiny.cohere, tiny.granite])
def test_families_that_alter_their_logits(make):
    model = make(dtype=torch.float64, attn_implementation="eager") if make is tiny.gemma2 else make(dtype=torch.float64)
    assert find_head(model) is not None
    got = policy_terms(model, rollouts(), temperature=0.8, want=ENTROPY)
    for row, (prompt, response) in enumerate(ROWS):
        logp, entropy = plain_logp(model, prompt, response, 0.8)
        assert got.logp[row][rollouts().mask[row]].tolist() == pytest.approx(logp, abs=1e-6)
        assert got.entropy[row][rollouts().mask[row]].tolist() == pytest.approx(entropy, abs=1e-6)


def test_a_soft_cap_is_c_times_tanh():
    """logits [60, 0] under a cap of 30: log p(1) is -28.92; z·tanh(z/c) would give -57.84."""
    head = find_head(tiny.gemma2(final_logit_softcapping=30.0))
    identity = type(head)(head.decoder, torch.nn.Identity(), None, False, head.cap)
    logits = identity.logits(torch.tensor([[60.0, 0.0]], dtype=torch.float64))
    assert float(pick_terms(logits, torch.tensor([1]), 1.0, frozenset())["logp"]) == pytest.approx(-28.9208, abs=1e-4)


def test_a_head_that_can_not_be_reproduced_takes_the_models_own_logits():
    """Something the configuration does not tell, and so small at first that only scaled states show it."""

    class Odd(type(tiny.llama())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = 25 * torch.tanh(out.logits / 25)
            return out

    model = tiny.llama(initializer_range=0.02)
    model.__class__ = Odd
    assert find_head(model) is None
    got = policy_terms(model, rollouts(), temperature=1.0)
    assert got.logp[0][rollouts().mask[0]].tolist() == pytest.approx(plain_logp(model, *ROWS[0])[0], abs=1e-5)


def test_temperature_is_applied_to_the_logits():
    """logits [2, 0], token 0, T = 0.5: ln softmax([4, 0])[0]."""
    terms = pick_terms(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5, ENTROPY)
    assert terms["logp"].item() == pytest.approx(-0.01815, abs=1e-5)
    p = 1 / (1 + math.exp(-4))
    assert terms["entropy"].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_truncated_support_is_renormalised():
    """probs [.5, .3, .15, .05], top-p 0.8 keeps .5 and .3: ln .625, not ln .5."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log().requires_grad_()
    for want in (frozenset(), ENTROPY):
        terms = pick_terms(logits, torch.tensor([0]), 1.0, want, torch.tensor([[0, 1, -1]]))
        assert terms["logp"].item() == pytest.approx(math.log(0.625), abs=1e-12)
        (grad,) = torch.autograd.grad(sum(terms.values()).sum(), logits)
        assert grad.isfinite().all()
        assert (grad[0, 2:] == 0).all()
    assert terms["entropy"].item() == pytest.approx(-0.625 * math.log(0.625) - 0.375 * math.log(0.375), abs=1e-12)
    free = pick_terms(logits, torch.tensor([0]), 1.0, frozenset(), torch.tensor([[-1, -1, -1]]))
    assert free["logp"].item() == pytest.approx(math.log(0.5), abs=1e-12)


def test_likeliest_ids_of_another_policy():
    model = tiny.gpt2(dtype=torch.float64)
    batch = rollouts([([5], [6, 7])])
    ids = torch.tensor([[[0, 1], [6, 3], [7, -1]]])
    got = policy_terms(model, batch.replace(topk_ids=ids), temperature=1.0, want=frozenset({"topk_logp"}))
    assert got.topk_logp[0, 1:, 0].tolist() == pytest.approx(got.logp[0, 1:].tolist())
    assert got.topk_logp[0, 2, 1].item() == 0.0


def test_wrong_input_is_named():
    model = tiny.gpt2()
    good = rollouts()
    with pytest.raises(MissingFieldError, match="tokens"):
        policy_terms(model, good.replace(tokens=None), temperature=1.0)
    with pytest.raises(InputError, match="temperature"):
        policy_terms(model, good, temperature=0.0)
    with pytest.raises(InputError, match="values"):
        policy_terms(model, good, temperature=1.0, want=frozenset({"values"}))
    with pytest.raises(InputError, match="entropie: this scorer makes"):
        policy_terms(model, good, temperature=1.0, want=frozenset({"entropie"}))
    with pytest.raises(InputError, match="vocabulary of 64"):
        policy_terms(model, rollouts([([5], [64])]), temperature=1.0)
    with pytest.raises(InputError, match="context of 64"):
        policy_terms(model, rollouts([([5] * 60, [6] * 6)]), temperature=1.0)
    with pytest.raises(InputError, match="row 0 position 2"):
        policy_terms(model, rollouts([([-1, -1], [7, 8])]), temperature=1.0)
    with pytest.raises(InputError, match="holds no token"):
        policy_terms(model, rollouts([([5], [7, -1])]), temperature=1.0)
    with pytest.raises(InputError, match="outside the ids"):
        policy_terms(model, rollouts([([5], [7])], support_ids=torch.tensor([[[-1], [8]]])), temperature=1.0)


def test_a_head_that_was_exchanged_is_found_again():
    model, batch = tiny.gpt2(dtype=torch.float64), rollouts()
    model.resize_token_embeddings(80, mean_resizing=False)
    got = policy_terms(model, batch, temperature=1.0).logp
    row, column = batch.mask.nonzero(as_tuple=True)
    whole = model(batch.tokens.clamp_min(0)).logits.log_softmax(-1)
    right = whole[row, column - 1].gather(-1, batch.tokens[row, column, None]).squeeze(-1)
    assert torch.allclose(got[row, column], right)
    got.sum().backward()
    assert bool(model.lm_head.weight.grad.any())


def test_a_reference_is_asked_without_dropout():
    model, reference = tiny.gpt2(), tiny.gpt2(seed=1, attn_pdrop=0.5, resid_pdrop=0.5)
    reference.train()
    kl = [
        policy_terms(
            model, rollouts(), temperature=1.0, want=frozenset({"kl_ref"}), reference=reference
        ).kl_ref.detach()
        for _ in range(2)
    ]
    assert torch.equal(kl[0], kl[1])
    assert not reference.training


@pytest.mark.parametrize("many", [False, True])
def test_a_reference_over_another_vocabulary_is_refused(many, monkeypatch):
    monkeypatch.setattr("kenpo.models.head.FEW_LOGITS", 0 if many else 10**9)
    with pytest.raises(InputError, match="reference's vocabulary has 80 entries, the model's 64"):
        policy_terms(
            tiny.llama(), rollouts(), temperature=1.0, want=frozenset({"kl_ref"}), reference=tiny.llama(vocab=80)
        )


def test_positions_that_change_the_whole_pass_are_out_of_reach():
    """longrope: one long row would give the rows beside it other frequencies."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4,
            "original_max_position_embeddings": 6, "factor": 4.0}  # fmt: skip
    model = tiny.phi3(rope_parameters=rope, original_max_position_embeddings=6)
    assert context_length(model) == 6
    with pytest.raises(InputError, match="context of 6"):
        policy_terms(model, rollouts(), temperature=1.0)


@pytest.mark.parametrize("few", [0, 10**9])
def test_a_bias_that_closes_an_id_leaves_the_divergence_finite(few, monkeypatch):
    monkeypatch.setattr("kenpo.models.head.FEW_LOGITS", few)
    models = [tiny.llama(dtype=torch.float64, seed=s) for s in (0, 1)]
    for model in models:
        bias = torch.zeros(64, dtype=torch.float64)
        bias[63] = -torch.inf
        model.lm_head.bias = torch.nn.Parameter(bias)
    terms = policy_terms(
        models[0], rollouts(), temperature=1.0, want=frozenset({"kl_ref", "entropy"}), reference=models[1]
    )
    (terms.kl_ref + terms.entropy).sum().backward()
    assert bool(terms.kl_ref.isfinite().all())
    assert float(terms.kl_ref.sum()) > 0
    assert all(bool(p.grad.isfinite().all()) for n, p in models[0].named_parameters() if "bias" not in n)
