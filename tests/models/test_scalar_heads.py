"""Values and scores: what they stand at, their gradients beside log-probs, and how they are saved."""

import pytest
import tiny
import torch

from kenpo.errors import InputError
from kenpo.models import shared_prompt
from kenpo.models.scorer import Scorer
from kenpo.models.value_head import FILE, load_heads, new_heads, save_heads
from models.test_shared_prompt import batch

D = torch.float64
LOGP, SCALARS = frozenset({"logp"}), frozenset({"values", "score"})


@pytest.fixture
def scorer():
    model = tiny.gpt2(dtype=D)
    return Scorer(model, temperature=0.8, heads=new_heads(model, ("values", "score"), seed=3))


def gradient(scorer):
    named = list(scorer.named_parameters())
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in named])
    for _, p in named:
        p.grad = None
    return found


def weights(rollouts):
    """A coefficient for every entry of every term, told by its place in the batch."""
    x = torch.sin(torch.arange(rollouts.mask.numel(), dtype=D)).reshape(rollouts.mask.shape)
    return {"logp": x, "values": x.flip(1) + 0.1, "score": x[:, 0] + 2.0, "entropy": 0.3 * x}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_where_they_stand(scorer, left, holes):
    """V before token t reads the state of token t-1, a score the state of the last trainable token itself."""
    rollouts = batch(left=left, holes=holes)
    found = scorer.terms(rollouts, SCALARS)
    for r in range(len(rollouts)):
        ids = rollouts.tokens[r][rollouts.tokens[r] >= 0]
        states = scorer.model.transformer(ids[None]).last_hidden_state[0].detach()
        mask = rollouts.mask[r][rollouts.tokens[r] >= 0]
        places = mask.nonzero().squeeze(1)
        head = scorer.heads["values"]
        right = states[places - 1] @ head.weight + head.bias
        assert torch.allclose(found.values[r][rollouts.mask[r]], right, atol=1e-12)
        head = scorer.heads["score"]
        assert float(found.score[r]) == pytest.approx(float(states[places[-1]] @ head.weight + head.bias), abs=1e-12)
    assert not found.values[~rollouts.mask].any()
    assert found.logp is None


@pytest.mark.parametrize("how", ["plain", "fused", "shared", "packed"])
def test_one_pass_has_the_gradients_of_two(how, monkeypatch):
    """A trunk critic: policy and value in one pass, or in one each."""
    model = tiny.gpt2(dtype=D)
    heads = new_heads(model, ("values", "score"), seed=3)
    rollouts = batch(holes=True)
    given = weights(rollouts)

    def found(want, scorer, chunk):
        scorer.backward(
            rollouts, lambda rows, policy, measure: {n: given[n][rows] for n in policy.tensors()}, want, chunk=chunk
        )
        return gradient(scorer)

    plain = Scorer(model, temperature=0.8, heads=heads)
    right = found(LOGP | {"entropy"}, plain, None) + found(SCALARS, plain, None)
    if how == "shared":
        monkeypatch.setattr(shared_prompt, "LEAST_TOKENS", 1)
    scorer = Scorer(model, temperature=0.8, heads=heads, packing="on" if how == "packed" else "off")
    got = found(LOGP | {"entropy"} | SCALARS, scorer, None if how == "plain" else 3)
    assert float((got - right).norm()) <= 1e-12 * float(right.norm())
    own = sum(p.numel() for p in heads.parameters())
    assert float(right[-own:].abs().min()) > 0


def test_coefficients_see_the_terms_of_their_rows(scorer):
    """A loss of the terms themselves, asked a chunk at a time, equals autograd on the whole batch."""
    rollouts = batch()
    want = LOGP | SCALARS
    policy = scorer.graph(rollouts, want)
    (policy.logp.exp().sum() + (policy.values**2).sum() + (policy.score**3).sum()).backward()
    right = gradient(scorer)
    asked = []

    def coefficients(rows, policy, measure):
        asked.append((rows, measure))
        return {"logp": policy.logp.exp(), "values": 2 * policy.values, "score": 3 * policy.score**2}

    scorer.backward(rollouts, coefficients, want, chunk=5)
    assert len(asked) > 2
    got = gradient(scorer)
    # exp(logp) is 1 off the mask, where no coefficient counts
    assert float((got - right).norm()) <= 1e-12 * float(right.norm())


def test_a_critic_alone_makes_no_logits(scorer, monkeypatch):
    monkeypatch.setattr("kenpo.models.terms.head_terms", None)
    found = scorer.terms(batch(), frozenset({"values"}))
    assert set(found.tensors()) == {"values"}
    assert bool(found.values.any())


def test_fresh_heads_say_nothing_and_nothing_to_train_gives_zeros():
    model = tiny.llama()
    scorer = Scorer(model, heads=new_heads(model, ("values", "score")))
    assert not scorer.terms(batch(), SCALARS).values.any()
    rollouts = batch()
    nothing = scorer.terms(rollouts.replace(mask=torch.zeros_like(rollouts.mask)), SCALARS | LOGP)
    assert nothing.score.shape == (len(rollouts),)
    assert nothing.values.shape == nothing.logp.shape == rollouts.mask.shape


def test_saved_beside_the_model_and_opened_again(scorer, tmp_path):
    save_heads(scorer.heads, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    again = Scorer(scorer.model, temperature=0.8, heads=load_heads(scorer.model, tmp_path))
    a, b = (s.terms(batch(), SCALARS) for s in (scorer, again))
    assert torch.equal(a.values, b.values)
    assert torch.equal(a.score, b.score)
    assert load_heads(scorer.model, tmp_path / "elsewhere") is None
    with pytest.raises(InputError, match="no scalar heads of this model"):
        load_heads(tiny.gpt2(n_embd=16), tmp_path)
    (tmp_path / FILE).write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="no scalar heads of this model"):
        load_heads(scorer.model, tmp_path)


def test_what_can_not_be_made_is_refused(scorer, monkeypatch):
    with pytest.raises(InputError, match="one of values, score"):
        new_heads(scorer.model, ("advantage",))
    with pytest.raises(InputError, match="values: this scorer makes"):
        Scorer(scorer.model).terms(batch(), frozenset({"values"}))
    monkeypatch.setattr("kenpo.models.scorer.find_head", lambda model: None)
    with pytest.raises(InputError, match="a scalar head reads the decoder's states"):
        Scorer(scorer.model, heads=scorer.heads)


def test_a_frozen_critic_stays(scorer):
    frozen = scorer.frozen()
    before = frozen.terms(batch(), SCALARS)
    with torch.no_grad():
        for _, p in scorer.named_parameters():
            p += 0.1
    after = frozen.terms(batch(), SCALARS)
    assert torch.equal(before.values, after.values)
    assert not torch.equal(scorer.terms(batch(), SCALARS).values, after.values)
    assert not any(p.requires_grad for _, p in frozen.named_parameters())
