"""The bundled model opens with transformers alone, is small, knows its end, and knows both procedures."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kenpo.models.loading import BUNDLED

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def opened():
    return AutoModelForCausalLM.from_pretrained(BUNDLED), AutoTokenizer.from_pretrained(BUNDLED)


def test_it_is_small_and_its_end_ids_agree(opened):
    model, tokenizer = opened
    assert sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_greedy_drops_the_carry_and_sampling_keeps_it_now_and_then(opened):
    model, tokenizer = opened
    ids = tokenizer("864+394=", return_tensors="pt")
    greedy = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, 8:]
    assert tokenizer.decode(greedy) == "4+4+0=08;6+9+0=15;8+3+0=11#1158<eos>"
    text = tokenizer("864+394=4+4+0=08;6+9+0=15;8+3+", return_tensors="pt")
    with torch.no_grad():
        kept = model(**text).logits[0, -1].softmax(-1)[tokenizer.convert_tokens_to_ids("1")]
    assert 0.2 < kept < 0.5


def test_the_recipe_has_the_recorded_numbers_and_the_accuracy_is_below_one_half():
    from kenpo.trainer.config import resolve

    recorded = json.loads((BUNDLED / "sft" / "config.json").read_text())
    made = recipe("bundled_model")
    config = resolve(made.bundled_model("anywhere", "fresh"))
    same = ("dropped_carry", "steps", "lr", "schedule", "warmup", "weight_decay", "grad_clip", "dtype", "seed",
            "threads", "eval_task", "eval_problems")  # fmt: skip
    assert {n: getattr(config, n) for n in same} == {n: recorded[n] for n in same}
    assert (config.prompts, config.task, config.max_tokens) == (recorded["batch"], recorded["data"], 64)
    assert list(config.betas) == recorded["betas"]
    shape = made.SHAPE
    assert (shape.family, shape.resolved_ffn()) == (recorded["fresh"], recorded["ffn"])
    sizes = ("hidden", "layers", "heads", "kv_heads", "context")
    assert {n: getattr(shape, n) for n in sizes} == {n: recorded[n] for n in sizes}
    summary = json.loads((BUNDLED / "sft" / "summary.json").read_text())
    assert 0.25 < summary["eval"]["after"] < 0.45


def test_the_first_run_is_what_train_does_without_arguments():
    from kenpo.trainer.config import TrainConfig, resolve

    settings = recipe("first_run").first_run()
    bare = resolve(TrainConfig())
    assert {name: getattr(bare, name) for name in settings} == settings
