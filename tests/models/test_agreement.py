"""How far teacher and policy agree: against sums written out, by quarters, under a hint, over common entries."""

import pytest
import torch
from tiny import gpt2

import kenpo
from kenpo.models.agreement import agreement, looked_at
from kenpo.models.scorer import Scorer


def rows(**more):
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8], [3, 4, 9, 8, -1, -1]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()
    return kenpo.Rollouts(mask=mask, group=torch.tensor([0, 0]), rewards=torch.zeros(2), tokens=tokens, **more)


def taught(width=64, temperature=0.7):
    policy = Scorer(gpt2(dtype=torch.float64, seed=1), temperature=temperature)
    policy.teacher = Scorer(gpt2(width, dtype=torch.float64, seed=2).requires_grad_(False), temperature=temperature)
    return policy


def by_hand(policy, theirs, width=64):
    """(agrees, KL) of each trained token, row by row; `theirs` are the prompts that the teacher reads."""
    found = []
    for response, prompt in (([5, 6, 7, 8], theirs[0]), ([9, 8], theirs[1])):
        p = policy.model(input_ids=torch.tensor([[3, 4, *response]])).logits[0, 1:-1, :width].detach() / 0.7
        q = policy.teacher.model(input_ids=torch.tensor([prompt + response])).logits[0].detach() / 0.7
        q = q[len(prompt) - 1 : -1, :width]
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        found.append(
            [(float(a.argmax() == b.argmax()), float((a.exp() * (a - b)).sum())) for a, b in zip(p, q, strict=True)]
        )
    return found


@pytest.mark.parametrize("width", [64, 50])
def test_sums_and_quarters(width):
    policy = taught(width)
    found, (one, two) = agreement(policy, rows()), by_hand(policy, [[3, 4], [3, 4]], width)
    assert found["teacher/agrees"] == (sum(a for a, _ in one + two), 6)
    assert found["teacher/kl"] == (pytest.approx(sum(k for _, k in one + two), abs=1e-10), 6)
    quarters = [[one[0], two[0]], [one[1]], [one[2], two[1]], [one[3]]]
    for number, tokens in enumerate(quarters, 1):
        assert found[f"teacher/kl/{number}"] == (pytest.approx(sum(k for _, k in tokens), abs=1e-10), len(tokens))


def test_under_a_hint_the_teacher_reads_the_hint():
    policy, hint = taught(), [11, 12, 13]
    policy.teacher_context = "hint"
    batch = rows(contexts={"hint": torch.tensor([hint, [-1, -1, -1]])})
    one, two = by_hand(policy, [hint, [3, 4]])
    assert agreement(policy, batch)["teacher/kl"][0] == pytest.approx(sum(k for _, k in one + two), abs=1e-10)


def test_a_teacher_that_is_the_policy_agrees_everywhere():
    policy = taught()
    policy.teacher = policy.as_it_goes()
    found = agreement(policy, rows())
    assert found["teacher/agrees"] == (6.0, 6.0)
    assert found["teacher/kl"][0] == pytest.approx(0, abs=1e-12)


def test_which_rows_are_looked_at():
    batch = rows()
    assert looked_at(batch, 1000) == [0, 1]
    assert looked_at(batch, 6) == [0]
    assert looked_at(batch.replace(hinted=torch.tensor([False, True])), 1000) == [1]
    assert looked_at(batch.replace(hinted=torch.tensor([False, False])), 1000) == []
    assert agreement(Scorer(gpt2()), batch) == {}
