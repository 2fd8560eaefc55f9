"""Runs in which the policy restates an expert's trace, and runs whose samples were drawn under a privileged prompt."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kenpo
from kenpo.batches import load_rollouts
from kenpo.episode import Episode, Segment, given
from kenpo.errors import InputError
from kenpo.experience.addition import AdditionTask
from kenpo.experience.mixture import Group, Member
from kenpo.experience.rephrase import Rephrase, RephraseOptions, filled
from kenpo.experience.verdict import Verdict
from kenpo.trainer.config import TrainConfig, to_dict
from kenpo.trainer.loop import train
from kenpo.trainer.settle import recorded_config

TASK = AdditionTask(0)
ENGINE = """
from kenpo.engines.hf import HFEngine
from kenpo.episode import Episode, Segment, given

class Restating(HFEngine):
    '''Answers what is asked with a trace or an explanation by 77; of every fourth prompt it is cut off.'''

    def sample(self, requests, done=None):
        found = super().sample(requests, done)
        for i, r in enumerate(requests):
            text = self.tokenizer.decode(list(r.prompt))
            if ";" in text:
                cut = text.startswith("77;") and text[3] in "12"
                ids = self.tokenizer("77", add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
                said = Segment(ids, sampled=True, logp=[-0.5, -0.25, -0.125], version=self.version)
                found[i] = Episode((given(r.prompt), said), finish="length" if cut else "stop", text="77")
        return found
"""


@pytest.fixture
def restated(options, tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    return options | {
        "algorithm": "repo", "settings": {"regularizers": []}, "eval_problems": 0, "record_batches": True, "steps": 3,
        "prompts": 4, "engine": f"{tmp_path}/engine.py:Restating", "rephrase_below": 1.0, "rephrase_share": 0.5,
    }  # fmt: skip


@pytest.fixture
def guided(options):
    return options | {
        "algorithm": "oc_grpo", "settings": {}, "eval_problems": 0, "record_batches": True, "steps": 3,
        "max_tokens": 6,
    }  # fmt: skip


def lines(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def batch(run, step=1):
    return load_rollouts(run / f"batches/{step:06d}.safetensors")


def weights(run, step):
    return load_file(str(run / f"checkpoints/step_{step:06d}/model.safetensors"))


def ids(model, text):
    return AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]


# -- restated traces --------------------------------------------------------------------------------------------------


def test_a_restated_answer_takes_the_place_of_the_worst(restated, tmp_path):
    """Its row holds the bare prompt, its own reward and the log-probs under the prompt that sampled it."""
    run = tmp_path / "run"
    train(TrainConfig(**(restated | {"out": str(run), "steps": 1})))
    got, records = batch(run), lines(run, "samples.jsonl")
    mine = (got.origin == 3).nonzero().flatten().tolist()
    assert mine
    assert torch.bincount(got.group).tolist() == [4] * 4
    for r in mine:
        prompt = ids(restated["model"], TASK.train(int(got.group[r])).prompt)
        tokens = got.tokens[r][got.tokens[r] >= 0].tolist()
        assert tokens == prompt + ids(restated["model"], "77") + [1]
        assert got.logp_sampler[r][got.mask[r]].tolist() == [-0.5, -0.25, -0.125]
        assert float(got.rewards[r]) == 1.0
        replaced = [x for x in records if x.get("aside") == "replaced" and x["problem"] == int(got.prompt_id[r])]
        group = [x["reward"] for x in records if "origin" not in x and x["problem"] == int(got.prompt_id[r])]
        assert len(replaced) == 1
        assert replaced[0]["reward"] == min(group)
    prepared = kenpo.prepare(kenpo.get("repo"), got)
    assert all(float(prepared.advantages[r][got.mask[r]][0]) > 0 for r in mine)


def test_every_sampled_token_counts_and_failures_stay_in_the_figures(restated, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(restated | {"out": str(run), "steps": 1})))
    records, line = lines(run, "samples.jsonl"), lines(run)[0]
    own = [r for r in records if "origin" not in r]
    others = [r for r in records if r.get("origin") == "rephrased"]
    assert line["reward"] == {"sum": pytest.approx(math.fsum(r["reward"] for r in own)), "count": 16}
    assert line["tokens"]["generated"] == sum(r["tokens"] for r in own) + 6 * len(others)
    assert line["rephrased/rows"] == {"sum": sum("aside" not in r for r in others), "count": len(others)}
    why = {r["aside"] for r in others if "aside" in r}
    assert why <= {"truncated", "no better than what it would replace"}
    assert "truncated" in why
    assert line["kl_sampler"]["count"] == int(batch(run).mask[batch(run).origin == 0].sum())
    assert line["sampler_gap"] < 1e-4


def test_a_prompt_that_is_not_hard_is_left_alone(restated, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(restated | {"out": str(run), "steps": 1, "rephrase_below": 0.0})))
    assert not bool((batch(run).origin == 3).any())
    assert not [r for r in lines(run, "samples.jsonl") if "origin" in r]


def member(reward, text="1", truncated=False):
    said = Segment([5, 1], sampled=True, logp=[-1.0, -1.0])
    episode = Episode((given([4]), said), finish="length" if truncated else "stop", text=text)
    return Member(episode, Verdict(reward, "ok"))


def test_why_an_answer_is_refused():
    rephrase = Rephrase(None, None, None, RephraseOptions())
    group = Group(0, TASK.train(0), [member(0.0) for _ in range(4)])
    good = member(1.0)
    assert rephrase.refusal(group, good.episode, good.verdict) is None
    for bad, why in (
        (member(1.0, truncated=True), "truncated"),
        (member(0.0), "no better"),
        (member(math.nan), "no better"),
        (member(1.0, text="As the Worked Solution says, 5."), "names the trace"),
    ):
        assert why in rephrase.refusal(group, bad.episode, bad.verdict)


class Stub:
    def __init__(self, answers):
        self.answers = answers

    def sample(self, requests, done=None):
        answers = [self.answers.pop(0) for _ in requests]
        return [member(0.0, text).episode for text in answers]


class Traces:
    def __init__(self, verifier):
        self.verifier, self.prompts = verifier, self

    def chosen(self, group, step, round_):
        return [None]

    def encode(self, problem, trace=None):
        return _Encoded([4])


class _Encoded(list):
    text = "trace"


class Right:
    def score(self, samples):
        return [Verdict(float(s.completion == "right"), "ok") for s in samples]


def test_the_buffer_stands_in_where_a_fresh_answer_is_refused():
    """One entry a prompt, the latest; the oldest leave; what it holds is JSON and comes back."""
    problems = [TASK.train(i) for i in range(3)]

    def step(state, answers, number):
        r = Rephrase(
            Traces(Right()), Stub(answers), None, RephraseOptions("{prompt}{trace}", "{prompt}{explanation}", buffer=2)
        )
        r.begin(json.loads(json.dumps(state)))
        groups = [Group(i, p, [member(0.0) for _ in range(4)]) for i, p in enumerate(problems)]
        r.join(groups, number, 0)
        return groups, r.kept(r.fresh())

    _, state = step(None, ["", "", "", "right", "right", "right"], 1)
    assert [id_ for id_, _ in state] == [problems[1].id, problems[2].id]
    groups, after = step(state, ["", "", "", "wrong", "wrong", "right"], 2)
    restated = [[m.told for m in g.members if m.origin == 3] for g in groups]
    assert restated == [[], [{"origin": "rephrased", "buffered": True}], [{"origin": "rephrased", "further_tokens": 2}]]
    assert [id_ for id_, _ in after] == [problems[1].id, problems[2].id]
    assert groups[1].members[0].verdict.reward == 1.0


def test_templates_take_texts_with_braces_and_whole_conversations():
    assert filled("1+1=", "{trace}|{prompt}", trace="{prompt}") == "{prompt}|1+1="
    talk = [{"role": "system", "content": "{trace}"}, {"role": "user", "content": "q"}]
    assert filled(talk, "{prompt}/{trace}", trace="t") == [talk[0], {"role": "user", "content": "q/t"}]
    for wrong in ({"explain": "{prompt}"}, {"answer": "{explanation}"}, {"answer": "{prompt}{prompt}{explanation}"}):
        with pytest.raises(InputError, match="must stand in it once"):
            RephraseOptions(**wrong)


def test_any_algorithm_takes_restated_answers(restated, tmp_path):
    run = tmp_path / "run"
    train(
        TrainConfig(
            **(restated | {"algorithm": "dr_grpo", "settings": {}, "rephrase": True, "out": str(run), "steps": 1})
        )
    )
    assert bool((batch(run).origin == 3).any())


# -- privileged prompts -----------------------------------------------------------------------------------------------


def logps(model, prompt, response):
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokens = torch.tensor([prompt + response])
    with torch.no_grad():
        found = net(tokens).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return found.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)


def test_the_scored_row_holds_the_plain_prompt_alone(guided, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(guided | {"out": str(run), "steps": 1, "guided_rows": 3, "dtype": "float64"})))
    got = batch(run)
    for r in range(len(got)):
        problem, shown = TASK.train(int(got.group[r])), r % 4 < 3
        plain = ids(guided["model"], problem.prompt)
        hinted = ids(guided["model"], f"{problem.extra['hint']};{problem.prompt}")
        row, response = got.tokens[r][got.tokens[r] >= 0].tolist(), got.tokens[r][got.mask[r]].tolist()
        assert row == plain + response
        context = got.contexts["guided"][r]
        assert context[context >= 0].tolist() == (hinted if shown else [])
        under = logps(guided["model"], hinted if shown else plain, response)
        assert torch.allclose(got.logp_guided[r][got.mask[r]], under, atol=1e-9)
        assert torch.allclose(got.logp_sampler[r][got.mask[r]], under, atol=1e-9)
    line = lines(run)[0]
    assert line["kl_sampler"]["count"] == int(got.mask[3::4].sum())
    assert line["sampler_gap"] < 1e-9
    assert 0.01 <= line["weight"]["sum"] / line["weight"]["count"] < 1


def test_with_nothing_to_show_it_is_grpo(guided, tmp_path):
    for name, change in (
        ("oc", {"guided_share": 0.0}),
        ("plain", {"algorithm": "grpo", "settings": {"regularizers": []}}),
    ):
        more = {"out": str(tmp_path / name), "steps": 2, "stages": (), "dtype": "float64"} | change
        train(TrainConfig(**(guided | more)))
    one, two = batch(tmp_path / "oc"), batch(tmp_path / "plain")
    assert torch.equal(one.tokens, two.tokens)
    assert lines(tmp_path / "oc")[0]["weight"]["sum"] == pytest.approx(lines(tmp_path / "oc")[0]["weight"]["count"])


def test_a_part_of_the_hint_is_shown(guided, tmp_path):
    run = tmp_path / "run"
    train(TrainConfig(**(guided | {"out": str(run), "steps": 1, "guided_share": 0.25})))
    got, problem = batch(run), TASK.train(0)
    hint = problem.extra["hint"]
    context = got.contexts["guided"][0]
    text = f"{hint[: math.ceil(len(hint) / 4)]};{problem.prompt}"
    assert context[context >= 0].tolist() == ids(guided["model"], text)


# -- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["restated", "guided"])
def test_such_a_run_goes_on_bit_for_bit(kind, request, tmp_path):
    fields = request.getfixturevalue(kind) | ({"rephrase_buffer": 3} if kind == "restated" else {})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for run in (whole, cut):
        train(TrainConfig(**(fields | {"out": str(run), "steps": 4, "keep": 0, "minibatches": 2})))
    state = json.loads((cut / "checkpoints/step_000002/trainer/state.json").read_text())
    assert kind == "guided" or len(state["source"]["mixture"]) == 3
    shutil.rmtree(cut / "checkpoints/step_000004")
    (cut / "summary.json").unlink()
    train(recorded_config(cut).but(out=str(cut), resume=True, quiet=True))
    one, two = weights(whole, 4), weights(cut, 4)
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("kind", ["restated", "guided"])
def test_two_processes_give_the_run_of_one(kind, request, tmp_path, spawn):
    more = {"steps": 2, "out": str(tmp_path / "one"), "dtype": "float64"}
    fields = request.getfixturevalue(kind) | more | ({"rephrase_buffer": 3} if kind == "restated" else {})
    train(TrainConfig(**fields))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(to_dict(recorded_config(tmp_path / "one"))))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29673")
    done = spawn("train", "--config", config, "--out", tmp_path / "two", launcher=launcher)
    _, err = done.communicate(timeout=200)
    assert done.returncode == 0, err[-2000:]
    one, two = (weights(tmp_path / run, 2) for run in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-6, atol=1e-9) for n in one)
    states = [
        json.loads((tmp_path / run / "checkpoints/step_000002/trainer/state.json").read_text())["source"]
        for run in ("one", "two")
    ]
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"algorithm": "grpo", "rephrase_buffer": 2}, "--rephrase-buffer: belongs to --rephrase"),
        ({"algorithm": "grpo", "rephrase_explain": "x"}, "--rephrase-explain: belongs to --rephrase"),
        ({"algorithm": "grpo", "guided_rows": 2}, "--guided-rows: no stage of 'grpo' corrects"),
        ({"algorithm": "grpo", "hint_column": "hint"}, "--hint-column"),
        ({"algorithm": "oc_grpo", "guided_rows": 9}, "--guided-rows 9 exceeds --group-size 4"),
        ({"algorithm": "oc_grpo", "guided_share": 1.5}, "--guided-share: 1.5"),
        ({"algorithm": "oc_grpo", "hint_column": "clue"}, "no hint in column 'clue'"),
        ({"algorithm": "repo", "expert_rows": 2}, "--expert-rows: with --rephrase no trace joins"),
        ({"algorithm": "repo", "rephrase_answer": "{prompt}"}, "--rephrase-answer: .*must stand in it once"),
        ({"algorithm": "repo", "rephrase_share": 1.5}, "--rephrase-share: 1.5"),
    ],
)
def test_options_without_effect_are_refused(change, what, guided, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(guided | change | {"out": str(tmp_path / "x")})))
    assert not (tmp_path / "x").exists()
