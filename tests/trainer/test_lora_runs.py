"""Runs that train an adapter: KL 0 at the start, adapters in checkpoints, resuming, what saves memory."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from kenpo.batches import load_rollouts
from kenpo.cli import main
from kenpo.errors import InputError
from kenpo.learner.optimizer import OPTIMIZERS
from kenpo.models.loading import load_model
from kenpo.runs import checkpoint as checkpoints
from kenpo.runs.callbacks import Callback
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train


def lines(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time"} for row in rows]


def last(run):
    return checkpoints.found(run / "checkpoints")[-1]


def from_reference(run, step):
    """The largest distance of a step's log-probs, as sampled, from the reference's."""
    batch = load_rollouts(run / "batches" / f"{step:06d}.safetensors")
    return float((batch.logp_sampler - batch.logp_ref)[batch.mask].abs().max())


def fall_after(step):
    class Fall(Callback):
        def on_step(self, done, figures):
            if done == step:
                raise ZeroDivisionError

    return [Fall()]


def stop_and_go_on(options, run):
    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**options, out=str(run)), fall_after(3))
    assert main(["train", "--resume", str(run), "--quiet"]) == 0


@pytest.mark.parametrize("adapter_only", [False, True])
def test_an_adapter_run_resumes_bit_for_bit(options, tmp_path, adapter_only):
    options |= {"lora_rank": 4, "settings": {}, "steps": 4, "lr": 1e-2, "save_adapter": adapter_only}
    train(TrainConfig(**options, out=str(tmp_path / "a")))
    stop_and_go_on(options, tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    name = "adapter_model.safetensors" if adapter_only else "trainer/adapter/adapter_model.safetensors"
    ours, theirs = (load_file(last(tmp_path / x) / name) for x in "ab")
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert any(bool(v.any()) for n, v in ours.items() if "lora_B" in n)
    assert (last(tmp_path / "a") / "model.safetensors").exists() != adapter_only
    assert from_reference(tmp_path / "a", 1) < 1e-5
    assert from_reference(tmp_path / "a", 4) > 1e-3


def test_a_trained_adapter_is_its_own_reference(options, tmp_path):
    """The run starts from base and adapter; its reference is that policy, not the bare base."""
    options |= {"settings": {}, "steps": 4, "lr": 3e-2}
    train(TrainConfig(**options, lora_rank=4, save_adapter=True, out=str(tmp_path / "first")))
    options["model"] = str(last(tmp_path / "first"))
    train(TrainConfig(**options, save_adapter=True, out=str(tmp_path / "second")))
    assert from_reference(tmp_path / "first", 4) > 1e-3
    assert from_reference(tmp_path / "second", 1) < 1e-5
    assert from_reference(tmp_path / "second", 4) > 1e-3
    stop_and_go_on(options | {"save_adapter": True}, tmp_path / "third")
    assert lines(tmp_path / "second") == lines(tmp_path / "third")
    names = load_file(last(tmp_path / "second") / "adapter_model.safetensors")
    assert not any("starting" in n for n in names)
    model, _ = load_model(last(tmp_path / "second"))
    assert any(p.requires_grad for p in model.parameters())


def test_checkpointed_layers_change_no_number(options, tmp_path):
    options |= {"dtype": "float64", "steps": 2}
    for name, on in (("a", False), ("b", True)):
        train(TrainConfig(**options, gradient_checkpointing=on, out=str(tmp_path / name)))
    a, b = (load_file(last(tmp_path / x) / "model.safetensors") for x in "ab")
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-9


def test_bfloat16_with_a_float32_head_resumes_bit_for_bit(options, tmp_path):
    options |= {"dtype": "bfloat16", "head_dtype": "float32", "steps": 4}
    train(TrainConfig(**options, out=str(tmp_path / "a")))
    stop_and_go_on(options, tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    a, b = (load_file(last(tmp_path / x) / "model.safetensors") for x in "ab")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert a["lm_head.weight"].dtype == torch.float32
    assert a["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_options_without_effect_are_refused(options, tmp_path):
    for extra, what in (
        ({"save_adapter": True}, "no adapter"),
        ({"lora_targets": ("q_proj",)}, "--lora-rank"),
        ({"lora_rank": 2, "lora_targets": ("nowhere",)}, "nowhere"),
    ):
        with pytest.raises(InputError, match=what):
            train(TrainConfig(**options, **extra, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_the_plan_tells(options, tmp_path):
    options |= {"settings": {}, "out": str(tmp_path / "run"), "dry_run": True}
    plan = train(TrainConfig(**options, lora_rank=4))["plan"]
    assert "of them trained" in plan
    assert "shared prompts   yes" in plan
    assert "padding          yes  sdpa attention would compute" in plan
    plan = train(TrainConfig(**options, gradient_checkpointing=True))["plan"]
    assert "shared prompts   no   gradient checkpointing" in plan


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_small_optimizers_resume_or_say_what_to_install(options, tmp_path, name):
    _, _, package = OPTIMIZERS[name]
    options |= {"optimizer": name, "steps": 4}
    if importlib.util.find_spec(package) is None:
        with pytest.raises(InputError, match=f"pip install {package}"):
            train(TrainConfig(**options, out=str(tmp_path / "a")))
        return
    if "paged" in name and not torch.cuda.is_available():
        pytest.skip("paged moments need a GPU")
    train(TrainConfig(**options, out=str(tmp_path / "a")))
    stop_and_go_on(options, tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
