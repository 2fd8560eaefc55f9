"""Fields that a few algorithms read and a run makes for them: each number is made again from the recorded weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

import kenpo
from kenpo.errors import InputError
from kenpo.experience.episode import answer_id
from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.types import Rollouts

from .test_resume import metrics, same_end, stop_after

NAMES = ["spo", "gapo", "mad_rl", "sis", "erpo", "dppo_topk", "trm-exact"]


@pytest.fixture
def run(options, tmp_path):
    """Two steps of an algorithm; its batches, and its weights before each step."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "valid": [str(i + 1), "7"], "target": [0.25, 0.75]}
            for i in range(1, 4)]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = options | {
        "task": str(tmp_path / "data.jsonl"), "verifier": options["verifier"], "prompts": 3, "steps": 2, "lr": 1e-2,
        "settings": {}, "eval_problems": 0, "keep": 0, "checkpoint_every": 1, "dtype": "float64",
    }  # fmt: skip

    def make(name, **more):
        out = tmp_path / name
        group = {"group_size": 1} if name == "spo" else {}
        train(TrainConfig(**(usual | {"algorithm": name, "out": str(out)} | group | more)))
        return [load_file(f) for f in sorted((out / "batches").iterdir())], found(out / "checkpoints")

    make.usual = usual
    return make


def logits_of(folder, batch):
    """log-softmax [B,T,V] of the token at each place, from a plain forward pass."""
    model, _ = load_model(str(folder), dtype="float64")
    ids = batch["tokens"].long().clamp_min(0)
    with torch.no_grad():
        whole = model(input_ids=ids).logits.log_softmax(-1)
    return torch.cat([whole[:, :1] * 0, whole[:, :-1]], 1)


@pytest.mark.parametrize("name", NAMES)
def test_they_train_and_their_part_is_fed(name, run):
    needs = kenpo.get(name).needs
    batches, _ = run(name)
    fields = {"spo": {"drift"}, "gapo": {"target_ids"}, "mad_rl": {"target_ids", "target_prob"},
              "sis": {"topk_ids", "topk_logp_old"}, "erpo": {"prompt_mask"}, "trm-exact": set(),
              "dppo_topk": {"topk_ids", "topk_logp_sampler"}}[name]  # fmt: skip
    assert fields <= needs
    assert all(fields <= batch.keys() for batch in batches)


def test_the_likeliest_tokens_are_those_of_the_weights_that_sampled(run):
    batches, weights = run("dppo_topk")
    folders = [run.usual["model"], weights[0]]
    for folder, batch in zip(folders, batches, strict=True):
        mask = batch["mask"].bool()
        logp = logits_of(folder, batch)[mask]
        k = min(20, logp.shape[-1])
        assert batch["topk_ids"].shape[-1] == k
        assert torch.allclose(batch["topk_logp_sampler"][mask], logp.topk(k).values, atol=1e-6)
        ids = batch["topk_ids"][mask].long()
        assert torch.allclose(logp.gather(-1, ids), batch["topk_logp_sampler"][mask], atol=1e-6)


def test_likeliest_tokens_under_top_k_sampling_are_the_kept_ones(run):
    batch = run("dppo_topk", top_k=3)[0][0]
    mask = batch["mask"].bool()
    assert batch["topk_ids"].shape[-1] == 3
    assert torch.allclose(batch["topk_logp_sampler"][mask].exp().sum(-1), torch.ones(int(mask.sum())).double())


def test_old_log_probs_stand_on_the_likeliest_tokens(run):
    batches, _ = run("sis")
    batch, mask = batches[0], batches[0]["mask"].bool()
    logp = logits_of(run.usual["model"], batch)[mask]
    assert torch.allclose(batch["topk_logp_old"][mask], logp.gather(-1, batch["topk_ids"][mask].long()), atol=1e-9)


def test_the_prompt_is_scored_but_for_its_first_token(run):
    batches, _ = run("erpo")
    batch = batches[0]
    prompt = batch["prompt_mask"].bool()
    before = batch["mask"].cumsum(1) == 0
    assert not prompt[:, 0].any()
    assert torch.equal(prompt[:, 1:], (before & (batch["tokens"] >= 0))[:, 1:])
    ids = batch["tokens"].long().clamp_min(0).unsqueeze(-1)
    logp = logits_of(run.usual["model"], batch).gather(-1, ids).squeeze(-1)
    both = prompt | batch["mask"].bool()
    assert torch.allclose(batch["logp_ref"][both], logp[both], atol=1e-9)


def test_the_drift_is_that_of_the_previous_response(run):
    batches, weights = run("spo", steps=3)
    assert batches[0]["drift"].isnan().all()
    seen = {}
    for step, batch in enumerate(batches):
        names = batch["prompt_id"].tolist()
        for row, name in enumerate(names):
            if name not in seen:
                assert batch["drift"][row].isnan()
                continue
            old, r = seen[name]
            ids = old["tokens"].long().clamp_min(0).unsqueeze(-1)
            now = logits_of(weights[step - 1], old).gather(-1, ids).squeeze(-1)[r]
            mask = old["mask"][r].bool()
            want = (old["logp_sampler"][r] - now)[mask].abs().mean()
            assert float(want) > 1e-4
            assert float(batch["drift"][row]) == pytest.approx(float(want), rel=1e-5)
        seen |= {name: (batch, row) for row, name in enumerate(names)}
    assert len(seen) < 9


def test_valid_answers_have_the_identity_of_extracted_ones(run):
    batch = run("mad_rl")[0][0]
    for row, prompt in enumerate(batch["prompt_id"].tolist()):
        right = {0: "2", 1: "3", 2: "4"}[prompt]
        assert batch["target_ids"][row].tolist() == [answer_id(right), answer_id("7")]
        assert batch["target_prob"][row].tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("name", "column", "value", "what"),
    [
        ("gapo", "valid", None, "give a list of them in column 'valid'"),
        ("gapo", "valid", ["4", " 4"], "lists an answer twice"),
        ("mad_rl", "target", [0.5, 0.6], "1 together"),
        ("mad_rl", "target", [1.0], "one for each valid answer"),
    ],
)
def test_rows_that_lack_them_are_refused_before_anything_is_sampled(name, column, value, what, run, tmp_path):
    row = {"prompt": "1+3=", "answer": "4", "valid": ["4", "5"], "target": [0.5, 0.5]} | {column: value}
    (tmp_path / "data.jsonl").write_text((json.dumps(row) + "\n") * 3)
    with pytest.raises(InputError, match=what):
        run(name)
    assert not (tmp_path / name).exists()


def test_the_divergence_from_the_sampler_is_over_the_whole_vocabulary(run, models):
    """After a change of the weights: KL(μ‖π) by plain softmaxes; before it: 0."""
    model, _ = load_model(str(models / "qwen3"), dtype="float64")
    scorer = Scorer(model, temperature=0.7)
    scorer.sampler = scorer.frozen()
    tokens = torch.tensor([[1, 4, 5, 6, 7, 8]])
    rows = Rollouts(mask=torch.tensor([[False, False, True, True, True, True]]), group=torch.zeros(1).long(),
                    rewards=torch.zeros(1), tokens=tokens)  # fmt: skip
    assert not scorer.terms(rows, frozenset({"kl_sampler"})).kl_sampler.any()

    def logp():
        with torch.no_grad():
            return (model(input_ids=tokens).logits / 0.7).log_softmax(-1)[0, 1:-1]

    before = logp()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype))
    want = (before.exp() * (before - logp())).sum(-1)
    got = scorer.terms(rows, frozenset({"kl_sampler"})).kl_sampler[0, 2:]
    assert float(want.min()) > 1e-5
    assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize(("lr", "closed"), [(1e-12, False), (0.1, True)])
def test_the_gate_of_trm_closes_when_the_policy_has_moved(lr, closed, run, tmp_path):
    """Every update but a batch's first is measured against the weights that sampled the batch."""
    run("trm-exact", lr=lr, epochs=3)
    kept = [line["kept"] for line in metrics(tmp_path / "trm-exact")]
    assert any(k["sum"] < k["count"] for k in kept) == closed
    assert all(k["sum"] > 0 for k in kept)


def test_a_snapshot_of_the_sampler_needs_its_own_weights(run, tmp_path):
    for more in ({"lag": 1}, {"sampler_noise": "bf16"}):
        with pytest.raises(InputError, match="over the whole vocabulary"):
            run("trm-exact", **more)


@pytest.mark.parametrize("name", ["spo", "dppo_topk", "trm-exact"])
def test_such_a_run_goes_on_bit_for_bit(name, run, tmp_path):
    more = {"steps": 4, "minibatches": 1 if name == "spo" else 3, "epochs": 2}
    options = run.usual | {"algorithm": name} | more | ({"group_size": 1} if name == "spo" else {})
    train(TrainConfig(**options, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**options, out=str(tmp_path / "b")), stop_after(3, fall))
    train(TrainConfig(**options, out=str(tmp_path / "b"), resume=True))
    same_end(tmp_path / "b", tmp_path / "a")


def test_an_endless_task_is_drawn_from_by_priority(options, tmp_path, capsys):
    fields = options | {"task": "addition", "algorithm": "spo", "settings": {}, "group_size": 1, "quiet": False,
                        "eval_problems": 0, "out": str(tmp_path / "run")}  # fmt: skip
    train(TrainConfig(**fields))
    assert "drawn by priority from its first 512" in capsys.readouterr().err
