"""Folders that are no model, or a damaged one: one line that says what to name or mend instead."""

import json
import shutil

import pytest
from tiny import byte_tokenizer, gpt2

from kenpo.errors import InputError
from kenpo.models.loading import load_model


@pytest.fixture
def folder(tmp_path):
    gpt2(vocab=300).save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_runs_folder_names_its_checkpoints(folder, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    shutil.copytree(folder, run / "checkpoints/step_000004")
    with pytest.raises(
        InputError, match=r"a run's folder, no model; name one of its checkpoints, such as .*step_000004"
    ):
        load_model(run)
    load_model(run / "checkpoints/step_000004")


def test_a_broken_generation_config_is_no_silent_loss_of_its_ends(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, ')
    with pytest.raises(InputError, match=r"generation_config\.json"):
        load_model(folder)


def test_dora_is_named(folder, tmp_path):
    pytest.importorskip("peft")
    from kenpo.models.lora import add_adapter, save_adapter

    model, _ = load_model(folder)
    add_adapter(model, 2, alpha=4.0, targets=("c_attn",), seed=0)
    save_adapter(model, tmp_path / "a")
    config = tmp_path / "a/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(InputError, match="DoRA"):
        load_model(tmp_path / "a")


def test_the_message_on_a_missing_base_says_whose_base_it_is(folder, tmp_path):
    pytest.importorskip("peft")
    from kenpo.models.lora import add_adapter, save_adapter

    model, _ = load_model(folder)
    add_adapter(model, 2, alpha=4.0, targets=("c_attn",), seed=0)
    save_adapter(model, tmp_path / "a")
    folder.rename(tmp_path / "gone")
    with pytest.raises(InputError, match=r"the base model that .*a/adapter_config\.json names"):
        load_model(tmp_path / "a")
