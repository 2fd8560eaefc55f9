"""Drawing tokens: the distribution, its log-probs, truncation, seeds, stop strings, options."""

import dataclasses
import math

import pytest
import tiny
import torch

from kenpo.engines.base import SamplingOptions, check_prompt_fits
from kenpo.engines.sampling import StopStrings, cut_text, decode, draw, take_best, uniforms
from kenpo.errors import InputError

PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)


def logp_of(dtype, options, u):
    got = draw(PROBS.log().to(dtype), torch.tensor([u]), options)
    return (
        int(got.ids),
        float(got.logp),
        None if got.support is None else [i for i in got.support[0].tolist() if i >= 0],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_top_p_keeps_the_smallest_set_and_renormalises(dtype):
    token, logp, support = logp_of(dtype, SamplingOptions(top_p=0.8), 0.1)
    assert (token, support) == (0, [0, 1])
    assert logp == pytest.approx(math.log(0.625), abs=1e-6)
    assert logp_of(dtype, SamplingOptions(top_p=0.81), 0.1)[2] == [0, 1, 2]
    assert logp_of(dtype, SamplingOptions(top_p=1e-9), 0.99) == (0, 0.0, [0])
    assert logp_of(dtype, SamplingOptions(top_k=3), 0.99)[2] == [0, 1, 2]
    assert logp_of(dtype, SamplingOptions(top_k=99), 0.99)[2] == [0, 1, 2, 3]
    # top-k first, then the mass is that of what is left: .5/.8 + .3/.8
    assert logp_of(dtype, SamplingOptions(top_k=2, top_p=0.6), 0.99)[2] == [0]


def test_inverse_distribution_function():
    cuts = [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7999, 1), (0.8001, 2), (0.9501, 3), (1 - 2**-53, 3)]
    for u, token in cuts:
        got, logp, support = logp_of(torch.float64, SamplingOptions(), u)
        assert got == token
        assert support is None
        assert logp == pytest.approx(math.log(PROBS[0, token]), abs=1e-12)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.5, 1 - 2**-53):
        got = draw(logits, torch.tensor([u], dtype=torch.float64), SamplingOptions())
        assert int(got.ids) in (1, 3)
        assert not bool(got.bad)


def test_frequencies_are_the_probabilities():
    n = 20000
    u = uniforms(range(n), 3)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    for column in range(3):
        got = draw(PROBS.log().expand(n, 4), u[:, column], SamplingOptions(temperature=2.0))
        want = (PROBS.log() / 2).softmax(-1)[0]
        assert (got.ids.bincount(minlength=4) / n - want).abs().max() < 0.015
    assert abs(float(torch.corrcoef(u.T)[0, 1])) < 0.03


def test_seeds_use_all_their_bits_and_rows_stand_alone():
    seeds = [0, 1, 2**32, 2**40 + 1, -1, 2**64 - 2]
    rows = uniforms(seeds, 8)
    assert len({tuple(r) for r in rows.tolist()}) == len(seeds)
    for i, s in enumerate(seeds):
        assert torch.equal(uniforms([s], 5)[0], rows[i, :5])


def test_greedy_reports_the_likeliest_and_nan_is_marked():
    got = take_best(torch.tensor([[2.0, 1.0], [torch.nan, 0.0]]), SamplingOptions(temperature=0.5))
    assert got.ids[0] == 0
    assert float(got.logp[0]) == pytest.approx(-math.log(1 + math.exp(-2)), abs=1e-6)
    assert got.bad.tolist() == [False, True]
    assert draw(torch.tensor([[torch.inf, 0.0]]), torch.tensor([0.5]), SamplingOptions()).bad.tolist() == [True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 2.5}, {"max_tokens": 0}, {"max_tokens": 1.5},
        {"stop": ("",)}, {"stop": "END"},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))) as caught:
        SamplingOptions(**wrong)
    assert "\n" not in str(caught.value)


def test_options_are_never_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingOptions().max_tokens = 3
    stops = ["a"]
    options = SamplingOptions(stop=stops)
    stops.append("b")
    assert options.stop == ("a",)


def test_a_prompt_must_leave_room():
    check_prompt_fits([1] * 9, 10, 5)
    check_prompt_fits([1] * 99, None, 5)
    with pytest.raises(InputError, match=r"row 7.*10 tokens.*context of 10"):
        check_prompt_fits([1] * 10, 10, 5, "row 7")
    with pytest.raises(InputError, match="no tokens"):
        check_prompt_fits([], 10, 5)


def test_stop_strings_match_across_token_borders_at_every_length():
    tokenizer = tiny.byte_tokenizer()
    for stop in (("42.",), ("é is",), ("\n\n", "zz")):
        for text in ("so the answer is 42. and 42.", "x" * 300 + " é is 42. fine \n\n it", "no end", "aé isé"):
            ids = tokenizer(text)["input_ids"]
            finder = StopStrings(tokenizer, stop, 2)
            hit = None
            for n, token in enumerate(ids):
                if finder.push([1], [token])[0]:
                    hit = n
                    break
            plain = next((n for n in range(len(ids)) if any(s in decode(tokenizer, ids[: n + 1]) for s in stop)), None)
            assert hit == plain
    assert cut_text("a b c b", ("b", "c")) == ("a ", True)
    assert cut_text("abc", ("x",)) == ("abc", False)


def test_stop_strings_look_at_the_end_only():
    """The cost per token must not grow with the response."""
    tokenizer, longest = tiny.byte_tokenizer(), 0
    finder = StopStrings(tokenizer, ("###",), 1)
    for token in tokenizer("a b c d e f g h " * 200)["input_ids"]:
        assert finder.push([0], [token]) == [False]
        longest = max(longest, len(finder.tokens[0]) - finder.start[0])
    assert longest < 160
