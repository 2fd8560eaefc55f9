"""Sampling from a mixture of two models: the distribution, the log-probs that are told, greedy ones left alone."""

import math

import pytest
import tiny
import torch

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.engines.mixture import MixtureEngine
from kenpo.errors import InputError
from kenpo.models.scorer import Scorer

PROMPTS = [(5, 6, 7), (9, 8)]


@pytest.fixture(scope="module")
def models():
    return tiny.llama(300, dtype=torch.float64, seed=1), tiny.gpt2(300, dtype=torch.float64, seed=2)


def engine(models, share=0.2):
    return MixtureEngine(HFEngine(models[0], tiny.byte_tokenizer()), Scorer(models[1]), share)


def mixed(models, ids, share, temperature):
    """log of the mixture's distribution after `ids`, written out."""
    p, q = ((m(input_ids=torch.tensor([ids])).logits[0, -1].detach() / temperature).softmax(-1) for m in models)
    return (share * q + (1 - share) * p).log()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_mixtures(models, temperature):
    options = SamplingOptions(max_tokens=6, temperature=temperature)
    requests = [Request(p, seed, options) for p in PROMPTS for seed in range(3)]
    for request, episode in zip(requests, engine(models).sample(requests), strict=True):
        ids = list(request.prompt)
        for token, logp in zip(episode.tokens, episode.logp, strict=True):
            assert logp == pytest.approx(float(mixed(models, ids, 0.2, temperature)[token]), abs=1e-9)
            ids.append(token)


def test_tokens_are_drawn_from_it(models):
    """First tokens of many samples: how often a token that only the teacher likes comes up."""
    n, options = 3000, SamplingOptions(max_tokens=1)
    found = engine(models, 0.5).sample([Request(PROMPTS[0], seed, options) for seed in range(n)])
    counts = torch.bincount(torch.tensor([e.tokens[0] for e in found]), minlength=300) / n
    want = mixed(models, list(PROMPTS[0]), 0.5, 1.0).exp()
    liked = int((want - 0.5 * models[0](input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)).argmax())
    error = math.sqrt(float(want[liked] * (1 - want[liked])) / n)
    assert abs(float(counts[liked] - want[liked])) < 4 * error


def test_greedy_ones_ask_the_policy_alone_and_are_told_at_their_places(models):
    options, told = SamplingOptions(max_tokens=5), {}
    requests = [
        Request(PROMPTS[0], 1, options),
        Request(PROMPTS[0], 0, options, greedy=True),
        Request(PROMPTS[1], 2, options),
    ]
    episodes = engine(models).sample(requests, lambda i, e: told.__setitem__(i, e))
    plain = HFEngine(models[0], tiny.byte_tokenizer())
    assert episodes[1].tokens == plain.sample([requests[1]])[0].tokens
    assert told == dict(enumerate(episodes))


def test_what_is_no_mixture_is_refused(models):
    with pytest.raises(InputError, match="share"):
        engine(models, 1.0)
    with pytest.raises(InputError, match="64 entries, the policy's 300"):
        engine((models[0], tiny.gpt2(64)))
