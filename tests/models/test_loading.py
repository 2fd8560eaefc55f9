"""Loading models, and prompts as token ids."""

import json
import shutil

import pytest
import tiny
import torch

from kenpo.errors import InputError, KenpoError
from kenpo.models import loading
from kenpo.models.loading import check_system, context_length, encode_prompt, load_model, stop_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.llama(300).save_pretrained(path)
    tiny.byte_tokenizer().save_pretrained(path)
    return path


def broken(folder, tmp_path, *remove):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in remove:
        (copy / name).unlink()
    return copy


def edited(folder, tmp_path, **changes):
    copy = broken(folder, tmp_path)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def refused(path, **options):
    with pytest.raises(KenpoError) as caught:
        load_model(path, **options)
    message = str(caught.value)
    assert caught.value.exit_status == 2
    assert "\n" not in message
    return message


def test_a_folder_in_each_dtype(folder):
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        model, tokenizer = load_model(folder, dtype=name)
        assert model.dtype == dtype
        assert not model.training
        assert all(p.requires_grad for p in model.parameters())
        assert encode_prompt(tokenizer, "12 + 30") == tokenizer("12 + 30")["input_ids"]
    model, _ = load_model(str(folder), trainable=False)
    assert not any(p.requires_grad for p in model.parameters())
    assert context_length(model) == 64


def test_what_is_missing_is_named(folder, tmp_path):
    assert "no such model folder" in refused("/no/such/folder")
    assert "no such model folder" in refused("./nothing")
    assert "no config.json" in refused(broken(folder, tmp_path / "a", "config.json"))
    assert "no weights" in refused(broken(folder, tmp_path / "b", "model.safetensors"))
    assert "no tokenizer" in refused(broken(folder, tmp_path / "c", "tokenizer.json"))
    assert "float16" in refused(folder, dtype="float16")
    assert "device" in refused(folder, device="gibberish")
    assert "a file" in refused(folder / "config.json")


def test_a_hub_that_gives_nothing(monkeypatch):
    import transformers

    def gone(*_args, **_kwargs):
        raise OSError("We couldn't connect to the hub.\nMore lines follow.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", gone)
    monkeypatch.setattr(loading, "_hub_is_out_of_reach", lambda _name: False)
    assert "hub gave nothing" in refused("someone/some-model")


def test_a_hub_out_of_reach_is_known_at_once(monkeypatch):
    import socket
    import urllib.request

    def no_address(*_args, **_kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    assert "hub can't be reached" in refused("someone/some-model-that-nobody-has")
    assert "no name a hub could have" in refused("someone/with spaces")


def test_what_is_no_whole_causal_model(folder, tmp_path):
    assert "not a causal language model" in refused(
        edited(folder, tmp_path / "a", architectures=["LlamaForTokenClassification"])
    )
    assert "don't fill the model" in refused(edited(folder, tmp_path / "b", num_hidden_layers=3))
    assert "don't fill the model" in refused(edited(folder, tmp_path / "c", vocab_size=301))
    damaged = broken(folder, tmp_path / "d")
    (damaged / "model.safetensors").write_bytes(b"nothing of use")
    assert "can't be loaded" in refused(damaged)
    unread = broken(folder, tmp_path / "e")
    (unread / "config.json").write_text("{")
    assert "config.json can't be read" in refused(unread)
    unread = broken(folder, tmp_path / "f")
    (unread / "tokenizer.json").write_text("{")
    assert "tokenizer can't be loaded" in refused(unread)


def test_chat_template_gives_a_flat_list_even_where_the_template_call_returns_a_dict():
    tokenizer = tiny.byte_tokenizer(template=tiny.CHAT)
    assert hasattr(tokenizer.apply_chat_template([{"role": "user", "content": "1"}]), "keys")
    ids = encode_prompt(tokenizer, "12 + 30")
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids) == "<s>user: 12 + 30</s><s>assistant: "
    with_system = encode_prompt(tokenizer, "12", system="be brief")
    assert tokenizer.decode(with_system) == "<s>system: be brief</s><s>user: 12</s><s>assistant: "
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "12"}]
    assert "be brief" not in tokenizer.decode(encode_prompt(tokenizer, own, system="be brief"))
    assert len(own) == 2


def test_without_a_template_text_is_encoded_as_it_is():
    tokenizer = tiny.byte_tokenizer()
    assert tokenizer.decode(encode_prompt(tokenizer, "12 + 30", system="not used")) == "12 + 30"
    with pytest.raises(InputError, match="--system: the tokenizer has no chat template"):
        check_system(tokenizer, "be brief")
    check_system(tokenizer, None)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == "a\n\nb"
    with pytest.raises(InputError, match="empty"):
        encode_prompt(tokenizer, "")


def test_a_template_that_refuses():
    tokenizer = tiny.byte_tokenizer(template="{{ raise_exception('no system role') }}")
    with pytest.raises(InputError, match="no system role"):
        encode_prompt(tokenizer, "12", system="x")


def test_an_end_that_the_tokenizer_appends_is_taken_off():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ids = encode_prompt(tokenizer, "12")
    assert ids[0] == 1
    assert ids[-1] != 2


def test_all_ends_of_sequence_count():
    model, tokenizer = tiny.llama(300), tiny.byte_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    model.config.eos_token_id = 11
    assert stop_ids(model, tokenizer) == {2, 7, 9, 11}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert stop_ids(model, tokenizer) == {2}
