"""Episodes: what an engine may say of its tokens, and how segments become rows."""

import pytest
import torch

from kenpo.engines.base import Request
from kenpo.episode import Episode, Segment, given, prompt_key
from kenpo.errors import InputError
from kenpo.experience.episode import Row, build_rollouts


def said(ids, version=0, turn=0, **more):
    return Segment(ids, sampled=True, logp=[-float(i) for i in ids], version=version, turn=turn, **more)


@pytest.mark.parametrize("logp", [[-1.0], [-1.0] * 4])
def test_logp_of_the_wrong_length_is_named(logp):
    with pytest.raises(InputError, match=rf"logp speaks of {len(logp)} token\(s\), the segment has 5"):
        Segment([1, 2, 3, 4, 5], sampled=True, logp=logp)


def test_a_response_needs_a_token_before_it():
    with pytest.raises(InputError, match="at least one token before"):
        Episode((said([1]),))
    with pytest.raises(InputError, match="finish 'done'"):
        Episode((given([1]), said([2])), finish="done")


def test_turns_and_changing_weights_within_one_row():
    """prompt [7,8], weights 3 sample [1], weights 4 go on with [2]; a tool answers [9]; they sample [5] in turn 1."""
    episode = Episode((given([7, 8]), said([1], 3), said([2], 4), given([9], turn=1), said([5], 4, turn=1)))
    rows = build_rollouts([Row(episode, 0)], also=["turn"])
    assert rows.tokens.tolist() == [[7, 8, 1, 2, 9, 5]]
    assert rows.mask.int().tolist() == [[0, 0, 1, 1, 0, 1]]
    assert rows.policy_version.tolist() == [[-1, -1, 3, 4, -1, 4]]
    assert rows.turn.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert rows.logp_sampler.tolist() == [[0, 0, -1, -2, 0, -5]]
    assert episode.prompt == [7, 8]
    assert episode.version == 3
    assert rows.prefix.tolist() == [prompt_key([7, 8])]


def test_a_row_without_log_probs_needs_none_only_where_nobody_reads_them():
    silent = Episode((given([7]), Segment([1], sampled=True)))
    with pytest.raises(InputError, match="no logp, which logp_sampler is made of"):
        build_rollouts([Row(silent, 0)])
    assert build_rollouts([Row(silent, 0)], without=["logp_sampler"]).logp_sampler is None


def test_numbers_of_a_row_and_their_absence():
    episode = Episode((given([7]), said([1])))
    rows = build_rollouts([Row(episode, 0, numbers={"baseline": 0.5}), Row(episode, 1)], also=["baseline"])
    assert rows.baseline[0] == 0.5
    assert rows.baseline[1].isnan()
    with pytest.raises(InputError, match="'entropies' is not a field"):
        build_rollouts([Row(episode, 0)], also=["entropies"])


def test_routes_and_likeliest_ids_stand_at_their_tokens():
    routes = torch.arange(4).reshape(2, 1, 2)
    episode = Episode((given([7]), said([1, 2], routes=routes, top_ids=[[1], [2, 3]], top_logp=[[-1.0], [-2.0, -3.0]])))
    rows = build_rollouts([Row(episode, 0)], also=["routes", "topk_ids", "topk_logp_sampler"])
    assert rows.routes.tolist() == [[[[-1, -1]], [[0, 1]], [[2, 3]]]]
    assert rows.topk_ids.tolist() == [[[-1, -1], [1, -1], [2, 3]]]
    assert rows.topk_logp_sampler.tolist() == [[[0, 0], [-1, 0], [-2, -3]]]


def test_requests_are_greedy_only_when_asked():
    assert not Request((1,)).greedy
    assert prompt_key([1, 23]) != prompt_key([12, 3])
