"""The parity gate: clean runs pass; each known cause, planted in an engine, is refused before its batch and named."""

import json

import pytest
import torch

from kenpo.errors import InputError, RunError
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train

FAULTS = '''
import copy

import torch

from kenpo.engines.base import Engine
from kenpo.engines.hf import HFEngine
from kenpo.episode import Episode, Segment, given


class Faulty(Engine):
    """Samples with a copy of the model, which an update reaches in part only."""

    def __init__(self, model, tokenizer):
        self.inner, self.version = HFEngine(copy.deepcopy(model), tokenizer), 0
        self.old = copy.deepcopy(self.inner.model)
        self.trained = model

    def sample(self, requests, done=None):
        found = self.inner.sample([self.asked(r) for r in requests])
        found = [self.told(r, e) for r, e in zip(requests, found)]
        for i, e in enumerate(found):
            if done is not None:
                done(i, e)
        return found

    def asked(self, request):
        return request

    def told(self, request, episode):
        return self.again(episode, episode.logp)

    def again(self, episode, logp):
        said = Segment(episode.tokens, sampled=True, logp=logp, version=self.version, support=episode.support)
        return Episode((given(episode.prompt), said), finish=episode.finish, text=episode.text)

    def update(self, weights, version):
        self.version = version
        self.old.load_state_dict(self.inner.model.state_dict())
        self.take(dict(weights()))

    def take(self, weights):
        self.inner.model.load_state_dict(weights)

    def read(self, ids, switch, at):
        """log-probs with the first `switch` tokens read by the weights before, of the tokens from `at` on."""
        with torch.no_grad():
            first = self.old(ids[:, :switch], use_cache=True)
            rest = self.inner.model(ids[:, switch:], cache=first.past_key_values, use_cache=True)
        logp = torch.cat([first.logits, rest.logits], 1)[0].log_softmax(-1)
        return logp[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0].tolist()


class Stale(Faulty):
    def take(self, weights):
        pass


class Clean(Faulty):
    pass


class Head(Faulty):
    """The head keeps its first weights while the embedding moves."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        for m in (self.inner.model, self.old):
            m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach().clone())

    def take(self, weights):
        self.inner.model.load_state_dict({n: t for n, t in weights.items() if n != "lm_head.weight"}, strict=False)


class Experts(Faulty):
    def take(self, weights):
        self.inner.model.load_state_dict({n: t for n, t in weights.items() if ".experts." not in n}, strict=False)


class NoAdapter(Faulty):
    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)

    def take(self, weights):
        pass


class Hot(Faulty):
    """Ignores the temperature that was asked for."""

    def told(self, request, episode):
        ids = torch.tensor([episode.prompt + episode.tokens])
        at = len(episode.prompt)
        with torch.no_grad():
            logp = self.inner.model(ids).logits[0].log_softmax(-1)[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0]
        return self.again(episode, logp.tolist())


class WholeVocabulary(Hot):
    """Samples by top-p and tells log-probs over everything."""


class Cached(Faulty):
    """Prompts of 16 tokens and more were read by the weights before."""

    def told(self, request, episode):
        at = len(episode.prompt)
        end = (at - 1) // 16 * 16
        if not end or not self.version:
            return self.again(episode, episode.logp)
        return self.again(episode, self.read(torch.tensor([episode.prompt + episode.tokens]), end, at))


class InFlight(Faulty):
    """The weights change after the second token of each response."""

    def told(self, request, episode):
        at = len(episode.prompt)
        if not self.version or len(episode.tokens) < 4:
            return self.again(episode, episode.logp)
        return self.again(episode, self.read(torch.tensor([episode.prompt + episode.tokens]), at + 2, at))


class Other(Faulty):
    """Reads another prompt than it was sent, and does not say so."""

    def told(self, request, episode):
        other = HFEngine(self.inner.model, self.inner.tokenizer)
        ids = torch.tensor([[5, *episode.prompt[1:], *episode.tokens]])
        at = len(episode.prompt)
        with torch.no_grad():
            logp = self.inner.model(ids).logits[0].log_softmax(-1)[at - 1 : -1].gather(1, ids[0, at:, None])[:, 0]
        return self.again(episode, logp.tolist())
'''


@pytest.fixture
def gated(options, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    more = {"gate_every": 3, "lr": 0.02, "eval_problems": 0, "dtype": "float64", "checkpoint_every": 0}
    return options | more


def engine(tmp_path, name):
    return f"{tmp_path / 'faults.py'}:{name}"


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["step"]]


@pytest.mark.parametrize("name", ["hf", "Clean"])
def test_a_clean_run_passes_and_its_gap_is_a_figure(name, gated, tmp_path):
    of = name if name == "hf" else engine(tmp_path, name)
    train(TrainConfig(**(gated | {"engine": of, "out": str(tmp_path / "run")})))
    gaps = {line["step"]: line.get("gate_gap") for line in lines(tmp_path / "run")}
    assert [step for step, gap in gaps.items() if gap is not None] == [1, 2, 3, 6]
    assert all(gap < 1e-9 for gap in gaps.values() if gap is not None)


@pytest.mark.parametrize(
    ("name", "more", "step", "cause"),
    [
        ("Stale", {}, 2, "Cause: stale weights"),
        ("Head", {}, 2, "Cause: a head left behind"),
        ("Head", {"tied": True}, 2, "Cause: a tied head left behind"),
        ("NoAdapter", {"lora_rank": 2}, 2, "Cause: an adapter not sent"),
        ("Hot", {"temperature": 0.7}, 1, "Cause: another temperature: the sampler's log-probs fit 1, not 0.7"),
        ("WholeVocabulary", {"top_p": 0.8}, 1, "Cause: top-p without renormalising"),
        ("InFlight", {}, 2, "Cause: a reload while requests were in flight"),
        ("Cached", {"long": True}, 2, "Cause: prefix cache not reset"),
        ("Other", {}, 1, "another tokenizer or template"),
        ("Experts", {"moe": True}, 2, "Cause: experts left behind"),
    ],
)
def test_each_cause_is_refused_before_its_batch_and_named(name, more, step, cause, gated, models, tmp_path):
    more = dict(more)
    if more.pop("tied", False):
        more["model"] = tied(models / "qwen3", tmp_path / "tied")
    if more.pop("long", False):
        task = tmp_path / "long.jsonl"
        rows = [{"prompt": f"{a}+{b}+{a}+{b}+{a}+{b}=", "answer": "1"} for a in range(10, 14) for b in range(20, 24)]
        task.write_text("".join(json.dumps(r) + "\n" for r in rows))
        more["task"] = str(task)
    if more.pop("moe", False):
        more |= {"model": mixture(tmp_path), "dtype": "float32"}
    with pytest.raises(RunError, match=cause) as error:
        train(TrainConfig(**(gated | more | {"engine": engine(tmp_path, name), "out": str(tmp_path / "run")})))
    assert f"step {step}: the sampler's log-probs differ" in str(error.value)
    if step > 1:  # no line is written before the first batch
        assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, step))


def tied(folder, out):
    """The model of a folder with its head tied to the embedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=True)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return str(out)


def mixture(tmp_path):
    """A folder of a tiny mixture of experts over the addition task's characters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from kenpo.experience.addition import character_tokenizer

    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    return str(tmp_path / "moe")


def test_a_wider_bound_lets_it_pass(gated, tmp_path):
    more = {"engine": engine(tmp_path, "Stale"), "gate_bound": 1e3, "steps": 3, "out": str(tmp_path / "run")}
    train(TrainConfig(**(gated | more)))
    gaps = [line["gate_gap"] for line in lines(tmp_path / "run")]
    assert gaps[0] < 1e-9
    assert min(gaps[1:]) > 1e-3


def test_old_tokens_are_not_looked_at(gated, tmp_path):
    train(TrainConfig(**(gated | {"lag": 1, "steps": 3, "out": str(tmp_path / "run")})))
    gaps = [line.get("gate_gap") for line in lines(tmp_path / "run")]
    assert gaps[0] < 1e-9
    assert gaps[1:] == [None, None]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gate_every": -1}, "--gate-every"),
        ({"gate_bound": 0.0}, "--gate-bound"),
        ({"gate_every": 0, "gate_bound": 0.1}, "the gate never looks"),
        ({"sampler_noise": "bf16"}, "that noise would stop the run"),
    ],
)
def test_what_has_no_effect_is_refused(change, what, gated, tmp_path):
    with pytest.raises(InputError, match=what):
        train(TrainConfig(**(gated | change | {"out": str(tmp_path / "x")})))
