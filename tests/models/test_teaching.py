"""A teacher's divergence on the policy's tokens: value and gradient against sums written out, on either path."""

import pytest
import torch
import torch.nn.functional as F
from tiny import gpt2

import kenpo
from kenpo.divergence import Divergence, Term
from kenpo.errors import InputError, MissingFieldError
from kenpo.models import head
from kenpo.models.scorer import Scorer
from kenpo.models.teaching import check_vocabulary

WANT = frozenset({"logp", "kl_teacher"})


def rows():
    tokens = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 9, 8, -1], [-1, 5, 6, 2, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]]).bool()
    return kenpo.Rollouts(mask=mask, group=torch.tensor([0, 0, 1]), rewards=torch.zeros(3), tokens=tokens)


def scorers(temperature=1.0, spec=None, hidden=48):
    student = Scorer(gpt2(dtype=torch.float64, seed=1), temperature=0.7)
    student.teacher = Scorer(gpt2(dtype=torch.float64, seed=2, n_embd=hidden).requires_grad_(False), temperature=0.7)
    student.term = Term("kl_teacher", "teacher", spec or Divergence("reverse"), temperature)
    return student


def written_out(student, rollouts, temperature):
    """KL(p‖q) at each trained token, by plain sums over the vocabulary."""
    found = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for b, (tokens, mask) in enumerate(zip(rollouts.tokens, rollouts.mask, strict=True)):
        real = tokens >= 0
        p, q = (
            F.log_softmax(m(input_ids=tokens[real][None]).logits[0] / temperature, -1)
            for m in (student.model, student.teacher.model)
        )
        for t in mask.nonzero().squeeze(1).tolist():
            at = int(real[: t + 1].sum()) - 2
            found[b, t] = (p[at].exp() * (p[at] - q[at])).sum()
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("few", [head.FEW_LOGITS, 0], ids=["whole logits", "a chunk at a time"])
def test_the_divergence_and_its_gradient(temperature, few, monkeypatch):
    monkeypatch.setattr("kenpo.models.teaching.FEW_LOGITS", few)
    student, rollouts = scorers(temperature), rows()
    want = written_out(student, rollouts, temperature)
    made = student.terms(rollouts, WANT)
    assert torch.allclose(made.kl_teacher, want, atol=1e-12)
    coefficients = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (written_out(student, rollouts, temperature) * coefficients).sum().backward()
    expected = {n: p.grad.clone() for n, p in student.model.named_parameters()}
    for chunk in (None, 2):  # a chunk asks for the fused head, which makes no divergence
        student.model.zero_grad()
        student.backward(
            rollouts,
            lambda at, policy, measure: {"kl_teacher": coefficients[at]},
            frozenset({"kl_teacher"}),
            chunk=chunk,
        )
        for name, p in student.model.named_parameters():
            assert torch.allclose(p.grad, expected[name], atol=1e-10), name
    assert all(p.grad is None for p in student.teacher.model.parameters())


@pytest.mark.parametrize("spec", [Divergence("forward"), Divergence(weight=0.5), Divergence("reverse", top=4)])
def test_both_paths_agree_for_every_kind(spec, monkeypatch):
    student, rollouts = scorers(spec=spec), rows()
    whole = student.terms(rollouts, WANT).kl_teacher
    monkeypatch.setattr("kenpo.models.teaching.FEW_LOGITS", 0)
    assert torch.allclose(student.terms(rollouts, WANT).kl_teacher, whole, atol=1e-10)
    assert bool((whole[~rollouts.mask] == 0).all())


def test_what_is_not_there_is_named():
    student, rollouts = scorers(), rows()
    assert "kl_teacher" in student.makes
    support = torch.full((*rollouts.mask.shape, 2), -1)
    with pytest.raises(InputError, match="whole vocabulary"):
        student.terms(rollouts.replace(support_ids=support), WANT)
    student.teacher = None
    assert "kl_teacher" not in student.makes
    with pytest.raises(MissingFieldError, match="needs a teacher"):
        student.terms(rollouts, WANT)


def test_a_teacher_of_another_vocabulary_is_refused():
    student = scorers()
    student.teacher = Scorer(gpt2(vocab=65, dtype=torch.float64))
    with pytest.raises(InputError, match="65 entries, the policy's 64"):
        student.terms(rows(), WANT)


class Words:
    def __init__(self, **ids):
        self.ids = ids

    def get_vocab(self):
        return self.ids


@pytest.mark.parametrize("theirs", [{"a": 1, "b": 0}, {"a": 0}, {"a": 0, "c": 1}])
def test_tokenizers_are_compared_by_content(theirs):
    check_vocabulary(Words(a=0, b=1), Words(a=0, b=1, more=2), "--teacher t")
    with pytest.raises(InputError, match="same vocabulary"):
        check_vocabulary(Words(a=0, b=1), Words(**theirs), "--teacher t")
