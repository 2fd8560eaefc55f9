"""From completions to rollouts, and dynamic sampling within its bound."""

import math

import pytest
import torch

import kenpo
from kenpo.batches import concatenate, load_rollouts, save_rollouts
from kenpo.engines.base import SamplingOptions
from kenpo.errors import InputError, RefillExhaustedError, RunError, VerifierError
from kenpo.experience.episode import Row, answer_id, build_rollouts
from kenpo.experience.source import BatchOptions, OnPolicy
from kenpo.ranks import Ranks
from kenpo.runs.checkpoint import found
from kenpo.seeds import stable_seed
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

from .stubs import Engine, Prompts, Task, Verifier, episode


class Asked(OnPolicy):
    """A source with its algorithm's selection at hand, asked from a place in the stream on."""

    def __init__(self, reward, algorithm="dapo", task=None, **fields):
        self.algorithm = kenpo.get(algorithm)
        options = BatchOptions(**{"prompts": 10, "group_size": 2, "max_refills": 2} | fields)
        task = task or Task()
        super().__init__(task, Verifier(reward), Engine(), Prompts(), Ranks(), options, SamplingOptions())

    def collect(self, step, cursor, priorities=None):
        usable = (lambda batch: kenpo.select(self.algorithm, batch)) if self.algorithm.selection else None
        return self.next(step, {"cursor": cursor}, priorities, usable)


def test_rows_hold_prompt_then_sampled_tokens():
    """The mask covers what was sampled, end token included; a truncated row gets none; padding is -1 on the right."""
    eos = 2
    rows = build_rollouts([
        Row(episode([5, 6], [3, eos]), 4, 1.0, 11, "1"),
        Row(episode([5, 6], [4, 4, 4], truncated=True), 4, math.nan, 11),
        Row(episode([eos, 8, 9], [eos]), 5, 0.5, 12, "x", parts={"format": 1.0}),
    ])  # fmt: skip
    assert rows.tokens.tolist() == [[5, 6, 3, eos, -1], [5, 6, 4, 4, 4], [eos, 8, 9, eos, -1]]
    assert rows.mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 0]]
    assert rows.truncated.tolist() == [False, True, False]
    assert rows.group.tolist() == [4, 4, 5]
    assert rows.prompt_id.tolist() == [11, 11, 12]
    assert rows.prefix[0] == rows.prefix[1] != rows.prefix[2]
    assert rows.logp_sampler[0].tolist() == [0, 0, -0.5, -1.0, 0]
    assert rows.policy_version[0].tolist() == [-1, -1, 3, 3, -1]
    assert rows.rewards.isnan().tolist() == [False, True, False]
    assert rows.answer.tolist() == [answer_id("1"), -1, answer_id("x")]
    assert rows.reward_parts["format"].isnan().tolist() == [True, True, False]
    assert rows.support_ids is None


def test_the_support_of_truncated_sampling_is_kept():
    rows = build_rollouts([Row(episode([5], [3, 4], support=[[3], [4, 9]]), 0, 1.0)], also=["support_ids"])
    assert rows.support_ids.tolist() == [[[-1, -1], [3, -1], [4, 9]]]


def test_two_rows_with_one_prompt_are_two_groups():
    rows = build_rollouts([Row(episode([5], [3]), 0, 1.0, 1), Row(episode([5], [3]), 1, 0.0, 2)])
    assert rows.group.tolist() == [0, 1]
    assert rows.prompt_id.tolist() == [1, 2]


def test_a_batch_that_never_fills_stops_at_its_bound():
    """10 prompts, every reward 1, three rounds allowed: exactly three generations, and the counts in the message."""
    c = Asked(lambda answer, i: 1.0)
    with pytest.raises(RefillExhaustedError, match="kept 0 of 10 needed groups after 3 rounds") as error:
        c.collect(1, 0)
    assert c.engine.calls == 3
    assert error.value.exit_status == 1


def test_refilling_takes_new_problems_and_drops_the_surplus():
    """Even problems have differing rewards: about half of each round is kept, in order, until 10 are there."""
    c = Asked(lambda answer, i: float(i % 2) if answer % 2 == 0 else 1.0)
    got = c.collect(1, 100)
    assert got.rollouts.prompt_id.tolist() == [p for p in range(100, 120, 2) for _ in range(2)]
    assert got.rollouts.group.tolist() == [g for g in range(10) for _ in range(2)]
    assert got.figures["rounds"] == 2
    assert got.state["cursor"] == 100 + got.figures["groups_kept"]["count"] == max(c.task.seen) + 1
    assert sorted(c.task.seen) == list(range(100, got.state["cursor"]))  # each problem once
    assert got.generated == 3 * 2 * got.figures["groups_kept"]["count"]
    assert sum(r["kept"] for r in got.records) == 20
    assert len(set(c.engine.seeds)) == len(c.engine.seeds)


def test_without_a_selection_nothing_is_refilled():
    got = Asked(lambda answer, i: 1.0, algorithm="grpo").collect(1, 0)
    assert (got.figures["rounds"], got.state["cursor"], len(got.rollouts)) == (1, 10, 20)


def test_samples_without_verdict_stay_in_the_batch_as_nan():
    got = Asked(lambda answer, i: math.nan if i == 3 else 1.0, algorithm="grpo").collect(1, 0)
    assert got.rollouts.rewards.isnan().nonzero().tolist() == [[3]]
    assert not kenpo.prepare(kenpo.get("grpo"), got.rollouts, None).selected[3]


def test_no_verdict_at_all_stops_the_run():
    with pytest.raises(VerifierError, match="no verdict on any of the 20 samples"):
        Asked(lambda answer, i: math.nan).collect(1, 0)
    with pytest.raises(RunError):
        Asked(lambda answer, i: math.nan).collect(2, 0)


def test_seeds_are_stable():
    assert stable_seed(0, 1, 2, 3, 4) == stable_seed(0, 1, 2, 3, 4)
    assert stable_seed(0, 1, 2, 3, 4) != stable_seed(0, 1, 2, 34)
    assert 0 <= stable_seed(2**70) < 2**63


def test_batches_round_trip_and_join(tmp_path):
    got = Asked(lambda answer, i: float(i % 2)).collect(1, 0).rollouts
    save_rollouts(tmp_path / "b.safetensors", got, {"step": 1})
    again = load_rollouts(tmp_path / "b.safetensors")
    assert again.tensors().keys() == got.tensors().keys()
    assert all(torch.equal(v, getattr(again, n)) for n, v in got.tensors().items())
    wide = concatenate([got[:2], got.replace(reward_parts={"x": got.rewards})])
    assert len(wide) == len(got) + 2
    assert wide.reward_parts["x"][:2].isnan().all()
    with pytest.raises(InputError, match="different fields"):
        concatenate([got, got.replace(truncated=None)])
    with pytest.raises(InputError, match="no such file"):
        load_rollouts(tmp_path / "none")
    (tmp_path / "bad").write_text("no")
    with pytest.raises(InputError, match="not a safetensors file"):
        load_rollouts(tmp_path / "bad")


def test_an_exhausted_run_leaves_a_checkpoint_and_goes_on_with_more_rounds(options, tmp_path):
    """The reward never differs, so dapo finds no group; the run ends with status 1 where it stood."""
    reward = tmp_path / "one.py"
    reward.write_text("def one(completion, answer, **kw):\n    return 1.0\n")
    fields = options | {"verifier": f"{reward}:one", "algorithm": "dapo", "settings": None, "max_refills": 1}
    with pytest.raises(RefillExhaustedError, match="kept 0 of 3"):
        train(TrainConfig(**fields, out=str(tmp_path / "run")))
    assert [p.name for p in found(tmp_path / "run" / "checkpoints")] == ["step_000000"]
    with pytest.raises(RefillExhaustedError, match="after 4 rounds"):
        train(TrainConfig(**(fields | {"max_refills": 3}), out=str(tmp_path / "run"), resume=True))


def test_tokens_are_counted_as_generated_filtered_and_trained(options, tmp_path):
    run = tmp_path / "run"
    summary = train(TrainConfig(**(options | {"algorithm": "dapo", "settings": None, "steps": 2}), out=str(run)))
    t = summary["tokens"]
    assert t["generated"] == t["filtered"] + t["trained"]
    trained = sum(int(load_rollouts(p).mask.sum()) for p in (run / "batches").iterdir())
    assert t["trained"] == trained > 0
