"""Runs that go on in another folder, on another day, and with a tracking service that goes away."""

import json
import os
import sys

import pytest
import torch

from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import Interrupted, train
from kenpo.trainer.settle import recorded_config

DATED = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def dated(models, tmp_path):
    """A model folder whose template writes the date, and a data file beside it."""
    import shutil

    folder = tmp_path / "home/m"
    shutil.copytree(models / "qwen3", folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": DATED.replace("%Y-%m-%d", "%d%m")}))
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(10, 22)]
    (tmp_path / "home/data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path / "home"


def test_a_run_goes_on_elsewhere_and_on_another_day_bit_for_bit(dated, options, tmp_path, monkeypatch):
    from kenpo.models import clock
    from kenpo.runs.callbacks import Callback

    class Stop(Callback):
        def on_step(self, step, figures):
            if step == 4:
                os.kill(os.getpid(), 15)

    def config(out):
        return TrainConfig(**(options | {"model": "m", "task": "data.jsonl", "out": out, "eval_problems": 0}))

    monkeypatch.chdir(dated)
    monkeypatch.setattr("time.time", lambda: 1.7e9)
    train(config("whole"))
    with pytest.raises(Interrupted):
        train(config("cut"), [Stop()])
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    monkeypatch.setattr("time.time", lambda: 1.7e9 + 5 * 86400)
    monkeypatch.setattr(clock, "_moment", None)
    train(recorded_config(dated / "cut").but(out=str(dated / "cut"), resume=True, quiet=True))
    one, two = ((dated / run / "samples.jsonl").read_text() for run in ("whole", "cut"))
    assert one == two
    recorded = json.loads((dated / "cut/config.json").read_text())
    assert recorded["task"] == str(dated / "data.jsonl")
    assert recorded["model"] == str(dated / "m")


def test_a_tracking_service_that_goes_away_leaves_the_run_alone(options, tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(
        "def init(**k): pass\ndef log(figures, step):\n    if step >= 2: raise ConnectionError('gone')\n"
        "def finish(): raise ConnectionError('gone')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    try:
        summary = train(TrainConfig(**(options | {"loggers": ("trackio",), "out": str(tmp_path / "run"), "steps": 4})))
    finally:
        sys.modules.pop("trackio", None)  # other tests look for the real one
    assert summary["steps"] == 4
    assert capsys.readouterr().err.count("the logger trackio failed (ConnectionError: gone)") == 1


def test_a_merged_adapter_on_a_tied_embedding_is_written_as_untied(models, tmp_path):
    pytest.importorskip("peft")
    from kenpo.models.loading import load_model
    from kenpo.models.lora import add_adapter
    from kenpo.runs.checkpoint import save_model

    model, tokenizer = load_model(models / "qwen3")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    add_adapter(model, 2, alpha=4.0, targets=("embed_tokens", "q_proj"), seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.normal_(0, 0.1)
    save_model(tmp_path / "merged", model, tokenizer)
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is True
    again, _ = load_model(tmp_path / "merged")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, again(input_ids=ids).logits, atol=1e-5)


def test_an_adapters_own_tokenizer_is_taken_and_its_base_is_named_whole(models, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from kenpo.models.loading import load_model
    from kenpo.models.lora import add_adapter, save_adapter

    monkeypatch.chdir(models)
    model, tokenizer = load_model("qwen3")
    add_adapter(model, 2, alpha=4.0, targets=("q_proj",), seed=0)
    save_adapter(model, tmp_path / "a")
    base = json.loads((tmp_path / "a/adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str((models / "qwen3").resolve())
    assert load_model(tmp_path / "a")[1].chat_template is None
    tokenizer.chat_template = "{{ messages[0]['content'] }}="
    tokenizer.save_pretrained(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert load_model(tmp_path / "a")[1].chat_template == tokenizer.chat_template
