"""What is trained on of a row of demonstrations: tags and ends once, and only texts."""

import json

import pytest
from tiny import byte_tokenizer

from kenpo.errors import InputError
from kenpo.experience.demonstrations import Text, encode, read_texts

OPENS = "{{ messages[0]['content'] }}{% if add_generation_prompt %}>>\n<think>\n{% endif %}"
PLAIN = "{{ messages[0]['content'] }}{% if add_generation_prompt %}>>\n{% endif %}"


def trained(template, response):
    tokenizer = byte_tokenizer(template=template)
    episode = encode(tokenizer, Text("hi", response, "row 1"))
    return tokenizer.decode([i for s in episode.segments for i in s.ids], skip_special_tokens=False), tokenizer


def test_a_think_block_that_the_template_opens_is_opened_once():
    text, _ = trained(OPENS, "<think>\nadd\n</think>\n4")
    assert text.count("<think>") == 1
    assert "<think>\nadd\n</think>\n4" in text


@pytest.mark.parametrize("response", ["<think>\nadd\n</think>\n4", "plain", "a <think> b"])
def test_otherwise_the_response_stays_as_it_is(response):
    text, _ = trained(PLAIN, response)
    assert response in text


def test_an_end_that_the_data_write_is_not_doubled():
    tokenizer = byte_tokenizer(template=PLAIN)
    for response in ("4", "4" + tokenizer.eos_token):
        ids = [i for s in encode(tokenizer, Text("hi", response, "row 1")).segments for i in s.ids]
        assert ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}],
        [],
        None,
        7,
    ],
)
def test_prompts_are_refused_as_in_reinforcement_learning(prompt, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "response": "x"}) + "\n")
    with pytest.raises(InputError, match=r"data\.jsonl: line 1"):
        read_texts(str(path), "prompt", "response")
