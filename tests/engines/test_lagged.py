"""Older weights that sample: which ones, exactly, their versions, files in place of memory, and the way back."""

import pytest
import tiny
import torch

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.hf import HFEngine
from kenpo.engines.lagged import LaggedEngine
from kenpo.engines.noise import NoisyEngine, parse_noise
from kenpo.errors import InputError
from kenpo.models.scorer import Scorer

REQUESTS = [Request((5, 6, 7), seed, SamplingOptions(max_tokens=5)) for seed in range(3)]


def engine(lag, **more):
    return LaggedEngine(HFEngine(tiny.llama(300), tiny.byte_tokenizer()), lag, **more)


def move(lagged, version):
    """Other weights, as an optimizer makes them: in place."""
    with torch.no_grad():
        for p in lagged.present.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(version)) * 0.02)
    lagged.update(lambda: iter(()), version)


@pytest.mark.parametrize("room", [0, 1, 9])
def test_each_batch_is_sampled_by_the_weights_of_k_batches_ago(room):
    lagged, said = engine(2, room=room), []
    for version in range(6):
        if version:
            move(lagged, 10 * version)
        said.append((lagged.version, [(e.tokens, e.logp) for e in lagged.sample(REQUESTS)]))
        now = [e.tokens for e in lagged.present.sample(REQUESTS)]
    assert [v for v, _ in said] == [0, 0, 0, 10, 20, 30]
    plain, again = HFEngine(tiny.llama(300), tiny.byte_tokenizer()), {}
    for version in range(6):
        if version:
            with torch.no_grad():
                for p in plain.model.parameters():
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * version)) * 0.02)
        again[10 * version] = [(e.tokens, e.logp) for e in plain.sample(REQUESTS)]
    assert all(found == again[version] for version, found in said)
    assert now == [t for t, _ in again[50]]  # evaluation asks the weights of the moment
    if lagged.folder is not None:
        assert len(list(lagged.folder.iterdir())) <= 3
        folder = lagged.folder
        lagged.close()
        assert not folder.exists()


def test_segments_bear_the_version_of_their_weights():
    lagged = engine(1)
    move(lagged, 4)
    assert {e.version for e in lagged.sample(REQUESTS)} == {0}
    move(lagged, 8)
    assert {e.version for e in lagged.sample(REQUESTS)} == {4}
    assert {e.version for e in lagged.present.sample(REQUESTS)} == {8}


def test_the_trained_weights_come_back_after_a_failure():
    lagged = engine(1)
    move(lagged, 1)
    before = {n: (p.data_ptr(), p.clone()) for n, p in lagged.present.model.named_parameters()}
    with pytest.raises(InputError):
        lagged.sample([Request((999,))])
    for n, p in lagged.present.model.named_parameters():
        assert p.data_ptr() == before[n][0]
        assert torch.equal(p, before[n][1])
    assert lagged.present.version == 1


@pytest.mark.parametrize("room", [0, 9])
def test_a_checkpoints_part(room):
    from kenpo.nested import join, split

    one, two = engine(2, room=9), engine(2, room=room)
    for version in (3, 6, 9):
        move(one, version)
    state = join(*split(one.state(), "state"))
    with torch.no_grad():
        for p, q in zip(two.present.model.parameters(), one.present.model.parameters(), strict=True):
            p.copy_(q)
    two.update(lambda: iter(()), 9)
    two.load(state)
    assert two.version == one.version == 3
    assert [e.logp for e in two.sample(REQUESTS)] == [e.logp for e in one.sample(REQUESTS)]
    for e in (one, two):
        move(e, 12)
    assert [e.logp for e in two.sample(REQUESTS)] == [e.logp for e in one.sample(REQUESTS)]
    with pytest.raises(InputError, match="--lag"):
        two.load(None)
    two.close()


def test_noise_is_what_the_log_probs_say():
    """In bfloat16 and at another temperature the told log-probs are the sampler's; greedy ones know nothing of it."""
    plain = HFEngine(tiny.llama(300), tiny.byte_tokenizer())
    greedy = [Request((5, 6, 7), 0, SamplingOptions(max_tokens=5), greedy=True)]
    scorer = Scorer(plain.model, temperature=0.5)
    for noise in ("bf16", "temperature=0.5"):
        noisy, told = NoisyEngine(plain, noise), {}
        episodes = noisy.sample([*REQUESTS, *greedy], lambda i, e, told=told: told.__setitem__(i, e))
        assert told == dict(enumerate(episodes))
        assert episodes[3].tokens == plain.sample(greedy)[0].tokens
        assert {p.dtype for p in plain.model.parameters()} == {torch.float32}
        if noise == "bf16":
            gaps = [
                abs(a - b)
                for e in episodes[:3]
                for a, b in zip(e.logp, by_scoring(Scorer(plain.model), e), strict=True)
            ]
            assert 1e-5 < max(gaps) < 0.5
        else:
            for e in episodes[:3]:
                assert e.logp == pytest.approx(by_scoring(scorer, e), abs=1e-4)


def by_scoring(scorer, episode):
    from kenpo.experience.episode import Row, build_rollouts

    batch = build_rollouts([Row(episode, 0, 0.0)])
    return scorer.terms(batch).logp[batch.mask].tolist()


@pytest.mark.parametrize("noise", ["fp8", "temperature", "temperature=0", "temperature=x", "temperature=-1"])
def test_other_noise_is_refused(noise):
    with pytest.raises(InputError, match="--sampler-noise"):
        parse_noise(noise)


def test_what_is_no_lag_is_refused():
    with pytest.raises(InputError, match="lag"):
        engine(0)
    with pytest.raises(InputError, match="bfloat16 already"):
        NoisyEngine(HFEngine(tiny.llama(300, dtype=torch.bfloat16), tiny.byte_tokenizer()), "bf16")
