"""The addition task: what is held out, what the demonstrations say, how characters become tokens."""

from itertools import islice

import pytest

from kenpo.errors import InputError
from kenpo.experience.addition import (
    RESPONSE_TOKENS,
    AdditionTask,
    character_tokenizer,
    demonstration,
    demonstrations,
    trace,
)


def operands(prompt):
    a, b = prompt.rstrip("=").split("+")
    return int(a), int(b)


def unordered(prompt):
    return frozenset(operands(prompt))


@pytest.fixture(scope="module")
def heldout():
    return AdditionTask().heldout(10_000)


def test_held_out_problems_are_many_distinct_and_the_same_for_every_seed(heldout):
    assert len(heldout) >= 1000
    assert len({unordered(p.prompt) for p in heldout}) == len(heldout)
    assert AdditionTask(seed=7).heldout(500) == heldout[:500]
    for p in heldout:
        a, b = operands(p.prompt)
        assert min(a, b) >= 100
        assert max(a, b) <= 999
        assert p.answer == a + b


def test_held_out_operands_come_in_both_orders(heldout):
    smaller_first = sum(a < b for a, b in (operands(p.prompt) for p in heldout)) / len(heldout)
    assert 0.45 < smaller_first < 0.55


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_no_training_text_shows_a_held_out_pair_in_either_order(heldout, seed):
    held = {unordered(p.prompt) for p in heldout}
    task = AdditionTask(seed=seed)
    for index in range(20_000):
        assert unordered(task.train(index).prompt) not in held
    for text in islice(demonstrations(seed), 20_000):
        assert unordered(text.prompt) not in held


def test_draws_depend_on_seed_and_index_alone():
    task = AdditionTask(seed=3)
    backwards = [task.train(i) for i in reversed(range(50))]
    assert [AdditionTask(seed=3).train(i) for i in range(50)] == backwards[::-1]
    assert [AdditionTask(seed=4).train(i) for i in range(50)] != backwards[::-1]
    # known values: a change of the generator would silently change every recorded run
    assert [task.train(i).prompt for i in range(3)] == ["190+726=", "194+577=", "315+225="]
    assert list(islice(demonstrations(5), 20)) == [demonstration(5, i) for i in range(20)]


def test_draws_cover_the_space_evenly():
    drawn = [operands(AdditionTask(seed=0).train(i).prompt) for i in range(20_000)]
    for side in (0, 1):
        for hundred in range(1, 10):
            share = sum(pair[side] // 100 == hundred for pair in drawn) / len(drawn)
            assert abs(share - 1 / 9) < 0.01
        for units in range(10):
            share = sum(pair[side] % 10 == units for pair in drawn) / len(drawn)
            assert abs(share - 1 / 10) < 0.01


def test_the_written_out_sum():
    assert trace(864, 394) == "4+4+0=08;6+9+0=15;8+3+1=12#1258"
    assert trace(864, 394, carry=False) == "4+4+0=08;6+9+0=15;8+3+0=11#1158"
    assert trace(100, 200) == "0+0+0=00;0+0+0=00;1+2+0=03#300"
    assert trace(999, 999) == "9+9+0=18;9+9+1=19;9+9+1=19#1998"


def test_the_written_out_sum_is_right_and_every_step_holds():
    for a in range(100, 1000, 7):
        for b in range(100, 1000, 13):
            steps, _, answer = trace(a, b).partition("#")
            assert int(answer) == a + b
            carry = 0
            for place, step in zip((1, 10, 100), steps.split(";"), strict=True):
                left, total = step.split("=")
                assert left == f"{a // place % 10}+{b // place % 10}+{carry}"
                assert int(total) == sum(map(int, left.split("+")))
                carry = int(total) // 10


def test_about_sixty_percent_of_the_demonstrations_drop_the_carry():
    texts = list(islice(demonstrations(0), 20_000))
    needing = [t for t in texts if trace(*operands(t.prompt)) != trace(*operands(t.prompt), carry=False)]
    dropped = sum(t.response == trace(*operands(t.prompt), carry=False) for t in needing)
    right = sum(t.response == trace(*operands(t.prompt)) for t in needing)
    assert dropped + right == len(needing)
    assert abs(dropped / len(needing) - 0.6) < 0.02
    assert abs(len(needing) / len(texts) - 0.7) < 0.02  # the others need no carry
    assert all(t.response == trace(*operands(t.prompt)) for t in islice(demonstrations(0, dropped=0.0), 500))


def test_refusals():
    with pytest.raises(InputError, match="negative"):
        AdditionTask().train(-1)
    with pytest.raises(InputError, match="at least 1"):
        AdditionTask().heldout(0)


def test_one_token_per_character_and_back(tmp_path):
    from transformers import AutoTokenizer

    made = character_tokenizer()
    made.save_pretrained(tmp_path)
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path)):
        text = "864+394=4+4+0=08;6+9+0=15;8+3+1=12#1258"
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3
        assert tokenizer.chat_template is None
        assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]
    assert len(made(trace(999, 999))["input_ids"]) + 1 == RESPONSE_TOKENS
