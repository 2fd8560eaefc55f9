"""Groups of earlier batches beside fresh ones: which, how old, as they were sampled, saved and resumed."""

import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from kenpo.cli import main
from kenpo.errors import InputError
from kenpo.experience.replay import Replay, ReplayOptions, replayed_groups
from kenpo.experience.source import Collected, Source
from kenpo.nested import join, split
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.types import Rollouts

from .test_resume import metrics, same_end, stop_after


class Counting(Source):
    """Two groups of two rows a step; everything of a row says which step made it."""

    def __init__(self, spreads=None):
        self.made, self.spreads = 0, spreads or {}

    def next(self, step, state, priorities=None, usable=None):
        cursor = state or 0
        rows = torch.tensor([[-1, step, step]] * 4, dtype=torch.int32)
        spread = torch.tensor([0.0, self.spreads.get(step, 0.0)] * 2)
        rollouts = Rollouts(
            mask=rows >= 0, group=torch.tensor([0, 0, 1, 1]), rewards=spread, policy_version=rows,
            logp_sampler=-rows.float() / 10, prompt_id=torch.tensor([2, 2, 3, 3]) + 2 * cursor,
        )  # fmt: skip
        return Collected(rollouts, state=cursor + 1, generated=8)


def played(options, steps=5, version=lambda: 0, spreads=None, state=None, first=1):
    """The steps that the groups of each batch come from, fresh ones first; and the last state."""
    source, seen = Replay(Counting(spreads), options, version), []
    for step in range(first, first + steps):
        made = source.next(step, state)
        state = made.state
        group = made.rollouts.group
        assert group.unique().tolist() == list(range(int(group.max()) + 1))
        seen.append([int(made.rollouts.policy_version[group == g].max()) for g in group.unique()])
    return seen, state


def test_the_order_of_the_draw():
    assert played(ReplayOptions(1))[0] == [[1, 1], [2, 2, 1], [3, 3, 1], [4, 4, 2], [5, 5, 2]]
    assert played(ReplayOptions(1, order="newest"))[0] == [[1, 1], [2, 2, 1], [3, 3, 2], [4, 4, 3], [5, 5, 4]]
    by_spread = played(ReplayOptions(1, order="priority"), spreads={1: 0.5, 2: 0.2, 3: 0.9})[0]
    assert by_spread == [[1, 1], [2, 2, 1], [3, 3, 1], [4, 4, 3], [5, 5, 3]]


def test_the_limit_forgets_the_oldest_and_age_forgets_what_is_too_old():
    seen, state = played(ReplayOptions(2, limit=3))
    assert seen == [[1, 1], [2, 2, 1, 1], [3, 3, 2, 2], [4, 4, 3, 3], [5, 5, 4, 4]]
    assert len(state["held"]) == 2
    assert played(ReplayOptions(1, limit=1))[0][-1] == [5, 5, 4]
    held = played(ReplayOptions(1, max_staleness=7), 2, version=lambda: 2)[1]
    late = Replay(Counting(), ReplayOptions(1, max_staleness=7), lambda: 9).next(3, held)
    assert late.figures["replay/expired"] == 1  # one of step 1 is left; those of step 2 are just young enough
    assert late.rollouts.policy_version.unique().tolist() == [-1, 2, 3]


def test_a_replayed_row_is_what_it_was_but_for_its_origin():
    source = Replay(Counting(), ReplayOptions(1), lambda: 0)
    first = source.next(1, None)
    second = source.next(2, first.state)
    again = second.rollouts[second.rollouts.origin == 1]
    before = first.rollouts[first.rollouts.group == 0]
    for name in ("logp_sampler", "policy_version", "rewards", "prompt_id", "mask"):
        assert torch.equal(getattr(again, name), getattr(before, name)), name
    assert second.rollouts.origin.tolist() == [0] * 4 + [1] * 2
    assert second.figures["replayed"] == {"sum": 2, "count": 6}
    assert second.generated == 8


def test_the_state_survives_a_file():
    state = played(ReplayOptions(1), 3)[1]
    plain, tensors = split(state, "state")
    on = played(ReplayOptions(1), 3, state=state, first=4)
    again = played(ReplayOptions(1), 3, state=join(plain, tensors), first=4)
    assert on[0] == again[0]


@pytest.mark.parametrize(("share", "prompts", "number"), [(0.5, 4, 2), (0.25, 16, 4), (0.3, 10, 3)])
def test_the_share_as_groups(share, prompts, number):
    assert replayed_groups(share, prompts) == number


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0, -1.0, 0.9])
def test_a_share_without_fresh_or_replayed_groups(share):
    with pytest.raises(InputError, match="at least one has to be replayed"):
        replayed_groups(share, 4)


def batches(run):
    return [load_file(f) for f in sorted((run / "batches").iterdir())]


@pytest.fixture
def replaying(options):
    return options | {"prompts": 4, "replay": 0.5, "eval_problems": 0, "lr": 1e-2, "algorithm": "m2po", "settings": {}}


def test_a_run_replays_what_was_recorded(replaying, tmp_path):
    train(TrainConfig(**replaying, out=str(tmp_path / "a")))
    made = batches(tmp_path / "a")
    assert len(made[0]["group"]) == 8
    for step, batch in enumerate(made[1:], 1):
        old = batch["origin"] == 1
        assert int(old.sum()) == 8
        known = {}
        for b in made[:step]:
            for r in (b["origin"] == 0).nonzero().squeeze(1).tolist():
                key = tuple(t for t in b["tokens"][r].tolist() if t >= 0)
                known.setdefault(key, []).append((b["policy_version"][r][b["mask"][r]].tolist(),
                                                  b["logp_sampler"][r][b["mask"][r]].tolist(),
                                                  float(b["rewards"][r])))  # fmt: skip
        for r in old.nonzero().squeeze(1).tolist():
            key = tuple(t for t in batch["tokens"][r].tolist() if t >= 0)
            mask = batch["mask"][r]
            mine = (batch["policy_version"][r][mask].tolist(), batch["logp_sampler"][r][mask].tolist(),
                    float(batch["rewards"][r]))  # fmt: skip
            assert mine in known[key]
    line = metrics(tmp_path / "a")[-1]
    assert line["staleness"]["sum"] > 0
    assert line["replayed"] == {"sum": 8, "count": 16}
    fresh = made[-1]["mask"][made[-1]["origin"] == 0].sum()
    assert line["tokens"]["generated"] == int(fresh)
    assert line["tokens"]["filtered"] == 0


def test_rows_too_old_leave_the_buffer(replaying, tmp_path):
    more = {"max_staleness": 1, "replay": 0.25}
    train(TrainConfig(**replaying | more, out=str(tmp_path / "a")))
    for step, batch in enumerate(batches(tmp_path / "a")):
        assert int(batch["policy_version"][batch["mask"]].min()) >= step - 1
    assert any(line["replay/expired"] for line in metrics(tmp_path / "a"))
    assert all(line["dropped_stale"]["sum"] == 0 for line in metrics(tmp_path / "a"))


@pytest.mark.parametrize("more", [{}, {"replay_order": "priority", "replay_limit": 5, "lag": 1}], ids=["", "priority"])
def test_a_replaying_run_goes_on_bit_for_bit(more, replaying, tmp_path):
    train(TrainConfig(**replaying | more, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**replaying | more, out=str(tmp_path / "b")), stop_after(3, fall))
    train(TrainConfig(**replaying | more, out=str(tmp_path / "b"), resume=True))
    same_end(tmp_path / "b", tmp_path / "a")


def test_a_killed_replaying_run_ends_as_one_left_alone(options, tmp_path, spawn):
    args = ["train", "--model", options["model"], "--verifier", options["verifier"], "--algorithm", "m2po", "--replay",
            "0.5", "--steps", "8", "--prompts", "4", "--group-size", "4", "--max-tokens", "8", "--lr", "1e-2",
            "--eval-problems", "0", "--checkpoint-every", "2", "--threads", "1", "--quiet"]  # fmt: skip
    assert main([*args, "--out", str(tmp_path / "a")]) == 0
    process = spawn(*args, "--out", tmp_path / "b")
    for _ in range(1200):
        if found(tmp_path / "b" / "checkpoints"):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(["train", "--resume", str(tmp_path / "b"), "--quiet"]) == 0
    same_end(tmp_path / "b", tmp_path / "a")


@pytest.mark.slow
def test_two_processes_replay_what_one_does(options, tmp_path, spawn):
    # Not m2po: a token with a ratio of 1 up to the last bit is outward or not by that bit, and enters its mean or not.
    args = ["train", "--model", options["model"], "--verifier", options["verifier"], "--algorithm", "off_policy_grpo",
            "--replay", "0.5", "--steps", "4", "--prompts", "4", "--group-size", "4", "--max-tokens", "8", "--dtype",
            "float64", "--lr", "1e-2", "--eval-problems", "0",
            "--checkpoint-every", "0", "--threads", "1", "--quiet"]  # fmt: skip
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29687")
    one, two = spawn(*args, "--out", tmp_path / "a"), spawn(*args, "--out", tmp_path / "b", launcher=launcher)
    assert one.wait(300) == 0
    assert two.wait(300) == 0
    for a, b in zip(batches(tmp_path / "a"), batches(tmp_path / "b"), strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["origin"], b["origin"])
        assert torch.equal(a["policy_version"], b["policy_version"])


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"replay": None, "replay_limit": 3}, "--replay-limit 3: nothing is replayed without"),
        ({"replay": None, "replay_order": "newest"}, "--replay-order newest: nothing is replayed"),
        ({"replay_limit": 0}, "--replay-limit: 0 is below"),
        ({"replay": 0.01}, "that is 0; at least one"),
        ({"minibatches": 3}, "the first batch holds 2 fresh groups"),
        ({"algorithm": "spo", "group_size": 1}, "would count a replayed one twice"),
        ({"prox_decay": 0.5}, "reads an averaged policy"),
    ],
)
def test_what_has_no_effect_is_refused(more, what, replaying, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**replaying | more, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_replaying_run_names_what_takes_old_samples_for_fresh_ones(options, capsys):
    for name, told in (("grpo", True), ("m2po", False)):
        capsys.readouterr()
        args = ["--model", options["model"], "--dry-run", "--threads", "1", "--algorithm", name, "--replay", "0.5"]
        assert main(["train", *args]) == 0
        assert ("stale samples: " in capsys.readouterr().out) == told
