"""Named contexts: a response read after another prompt gives its terms at the row's own places."""

import pytest
import torch
from tiny import gpt2

import kenpo
from kenpo.batches import concatenate, from_bytes, to_bytes
from kenpo.contexts import has_context, in_context
from kenpo.divergence import Divergence, Term
from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError, MissingFieldError
from kenpo.experience.episode import Row, build_rollouts
from kenpo.learner.learner import Learner
from kenpo.models.scorer import Scorer

HINT = [11, 12, 13, 14]


def rows(hint=True):
    """Two rows of one group, the second a dialogue; only the first has the context."""
    first = Episode((given([3, 4]), Segment([5, 6, 7], True, [-1.0] * 3)), contexts={"hint": HINT} if hint else {})
    second = Episode(
        (given([3, 4, 8]), Segment([9], True, [-1.0]), given([2]), Segment([7, 6], True, [-1.0, -2.0])), contexts={}
    )
    made = [Row(first, 0, 1.0), Row(second, 0, 0.0)]
    return build_rollouts(made, contexts=["hint"], dtype=torch.float64)


def by_hand(model, prompt, response):
    """log-probs of `response` after `prompt`, from one plain pass."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    return [float(logits.detach()[len(prompt) + i - 1, token]) for i, token in enumerate(response)]


@pytest.mark.parametrize("through", ["scorer", "learner"])
def test_terms_of_a_context_stand_at_the_rows_own_places(through):
    scorer, batch = Scorer(gpt2(dtype=torch.float64, seed=1)), rows()
    asked = scorer if through == "scorer" else Learner(scorer)
    found = asked.terms(batch, frozenset({"logp", "entropy"}), context="hint")
    assert found.logp.shape == found.entropy.shape == batch.mask.shape
    assert found.logp[0, 2:5].tolist() == pytest.approx(by_hand(scorer.model, HINT, [5, 6, 7]), abs=1e-12)
    plain = scorer.terms(batch)
    assert torch.allclose(found.logp[1], plain.logp[1], atol=1e-12)  # without the context: after its own prompt
    assert not torch.allclose(found.logp[0], plain.logp[0], atol=1e-3)
    assert bool((found.logp[~batch.mask] == 0).all())


def test_a_teacher_under_a_hint_is_compared_token_by_token():
    student, batch = Scorer(gpt2(dtype=torch.float64, seed=1)), rows()
    student.teacher, student.teacher_context = Scorer(gpt2(dtype=torch.float64, seed=2).requires_grad_(False)), "hint"
    student.term = Term("kl_teacher", "teacher", Divergence("reverse"))
    found = student.terms(batch, frozenset({"kl_teacher"})).kl_teacher
    for row, mine, theirs in ((0, [3, 4], HINT), (1, [3, 4, 8], [3, 4, 8])):
        tokens = batch.tokens[row][len(mine) :].tolist()
        tokens = [t for t in tokens if t >= 0]
        p = student.model(input_ids=torch.tensor([mine + tokens])).logits.detach()[0, len(mine) - 1 :].log_softmax(-1)
        q = (
            student.teacher.model(input_ids=torch.tensor([theirs + tokens]))
            .logits[0, len(theirs) - 1 :]
            .log_softmax(-1)
        )
        kl = (p.exp() * (p - q)).sum(-1)
        for i in range(len(tokens)):
            at = len(mine) + i
            if batch.mask[row, at]:
                assert float(found[row, at]) == pytest.approx(float(kl[i]), abs=1e-12)
            else:
                assert float(found[row, at]) == 0


def test_what_is_there_and_what_is_not():
    batch = rows()
    assert has_context(batch, "hint").tolist() == [True, False]
    hinted = in_context(batch, "hint")
    assert hinted.tokens.tolist() == [[*HINT, -1, -1, 5, 6, 7, -1, -1], [-1, -1, -1, -1, 3, 4, 8, 9, 2, 7, 6]]
    assert hinted.mask.tolist() == [[False] * 4 + row for row in batch.mask.tolist()]
    assert hinted.prefix is None
    with pytest.raises(MissingFieldError, match=r"'guided'.*holds: hint"):
        in_context(batch, "guided")
    with pytest.raises(InputError, match=r"contexts\.hint"):
        batch.replace(contexts={"hint": torch.zeros(3, 2, dtype=torch.int64)})


def test_contexts_travel_with_their_rows():
    batch, bare = rows(), rows(hint=False)
    assert has_context(bare, "hint").tolist() == [False, False]
    whole = concatenate([bare, batch])
    assert has_context(whole, "hint").tolist() == [False, False, True, False]
    assert whole[[2]].contexts["hint"].tolist() == [HINT]
    assert concatenate([batch.replace(contexts={}), batch]).contexts["hint"].shape == (4, 4)
    back = from_bytes(to_bytes(whole))
    assert torch.equal(back.contexts["hint"], whole.contexts["hint"])
    assert isinstance(whole, kenpo.Rollouts)
