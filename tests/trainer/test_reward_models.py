"""A trained reward model as a verifier: its score is the reward, whatever else is judged beside it."""

import json
import shutil

import pytest
import torch

from kenpo.batches import load_rollouts
from kenpo.errors import InputError
from kenpo.experience.reward_model import RewardModel
from kenpo.experience.verdict import Sample
from kenpo.models.loading import load_model
from kenpo.models.value_head import load_heads, new_heads, save_heads
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config


@pytest.fixture(scope="module")
def judge(models, tmp_path_factory):
    """A folder as a run of reward_model leaves it: random weights, and a head that says something."""
    folder = tmp_path_factory.mktemp("judge") / "reward"
    model, tokenizer = load_model(str(models / "qwen3"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_heads(new_heads(model, ["score"], seed=3), folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from fresh_model import Architecture

    from kenpo.experience.addition import character_tokenizer

    root, tokenizer = tmp_path_factory.mktemp("models"), character_tokenizer()
    Architecture("qwen3", hidden=32, layers=2, heads=2, context=64).build(tokenizer, 0).save_pretrained(root / "qwen3")
    tokenizer.save_pretrained(root / "qwen3")
    return root


def by_hand(folder, text):
    """The head's word on the state of the last token, one row without padding."""
    model, tokenizer = load_model(str(folder))
    heads = load_heads(model, folder)
    states = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
    return (states @ heads["score"].weight + heads["score"].bias).item()


def test_the_score_is_the_heads_at_the_last_token_the_end_included_unless_it_was_cut_off(judge):
    ask = [
        Sample(completion="#579", answer=0, prompt="123+456=", group=0),
        Sample(completion="#57", answer=0, prompt="123+456=", group=0, truncated=True),
        Sample(completion="", answer=0, prompt="1+1=", group=1),
    ]
    want = [by_hand(judge, t) for t in ("123+456=#579<eos>", "123+456=#57", "1+1=<eos>")]
    with RewardModel(f"model:{judge}") as verifier:
        found = verifier.score(ask)
    assert [v.reward for v in found] == pytest.approx(want, abs=1e-5)
    assert len({round(x, 3) for x in want}) == 3


def test_what_is_judged_beside_a_group_changes_nothing(judge):
    """To the last bit, in any order: the judge takes groups as they come, and a resumed run must repeat."""
    ask = [Sample(completion="#" + "1" * (n % 5), answer=0, prompt=f"{n // 3}+1=", group=n // 3) for n in range(9)]
    verifier = RewardModel(f"model:{judge}")
    whole = [v.reward for v in verifier.score(ask)]
    apart = [v.reward for g in (0, 3, 6) for v in verifier.score(ask[g : g + 3])]
    assert whole == apart
    mixed = [0, 3, 1, 6, 4, 7, 2, 5, 8]
    assert [v.reward for v in verifier.score([ask[i] for i in mixed])] == [whole[i] for i in mixed]


def test_what_it_cannot_read_gets_no_verdict(judge):
    verdicts = RewardModel(f"model:{judge}").score(
        [Sample(completion="1" * 80, answer=0, prompt="1+1="), Sample(completion="abc", answer=0, prompt="1+1=")]
    )
    assert [v.status for v in verdicts] == ["abstain", "abstain"]
    assert "context" in verdicts[0].detail
    assert "does not know" in verdicts[1].detail


def test_a_folder_without_a_head_is_refused(models):
    with pytest.raises(InputError, match="no head for scores"):
        RewardModel(f"model:{models / 'qwen3'}")


def test_a_run_under_a_reward_model_beside_the_tasks_own_verifier(judge, models, options, tmp_path):
    """`--verifier model:PATH=1 numeric=0`: the score is the reward, the verifier's word is recorded; a changed reward
    model is noticed on resume."""
    run, judge = tmp_path / "run", shutil.copytree(judge, tmp_path / "reward")
    changes = {"model": str(models / "qwen3"), "verifier": (f"model:{judge}=1", "numeric=0"), "out": str(run)}
    train(TrainConfig(**(options | changes | {"steps": 2, "record_batches": True, "checkpoint_every": 1})))
    batch = load_rollouts(run / "batches/000001.safetensors")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {"model", "numeric"} == set(samples[0]["parts"])
    for row, sample in enumerate(samples[:12]):
        assert float(batch.rewards[row]) == pytest.approx(sample["parts"]["model"], abs=1e-6)
    end = "" if samples[0]["truncated"] else "<eos>"
    want = by_hand(judge, samples[0]["prompt"] + samples[0]["completion"] + end)
    assert samples[0]["parts"]["model"] == pytest.approx(want, abs=1e-4)
    model, _ = load_model(str(judge))
    save_heads(new_heads(model, ["score"], seed=4), judge)
    (run / "summary.json").unlink()
    with pytest.raises(InputError, match="reward model reward"):
        train(recorded_config(run).but(out=str(run), resume=True, quiet=True))
