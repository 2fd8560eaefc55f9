"""Ids to text: special tokens, tags, and ids with gaps."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kenpo.engines.text import decode, decode_all

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SAID = "<think>2+2</think><answer>4</answer>"


def tokenizer(extra=(), first=259, special=True):
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ends = ["<s>", "</s>", "<|im_end|>"]
    vocabulary |= {token: 256 + i for i, token in enumerate(ends)}
    vocabulary |= {token: first + i for i, token in enumerate(extra)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ends])
    add = made.add_special_tokens if special else made.add_tokens
    add([AddedToken(token, special=special, normalized=False) for token in extra])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def ids(made, text):
    return made(text, add_special_tokens=False)["input_ids"]


def test_tags_that_are_special_tokens_are_kept_and_control_tokens_are_not():
    made = tokenizer(TAGS)
    assert decode(made, ids(made, f"<s>{SAID}<|im_end|></s>")) == SAID


def test_a_pair_that_begins_and_ends_a_text_is_no_tag():
    made = tokenizer()
    assert decode(made, ids(made, "<s>4</s>")) == "4"


def test_a_special_token_without_a_partner_is_no_tag():
    made = tokenizer(("<tool>", "<answer>", "</answer>"))
    assert decode(made, ids(made, "<tool><answer>4</answer>")) == "<answer>4</answer>"


@pytest.mark.parametrize("extra", [(), TAGS])
def test_all_special_tokens_can_be_kept(extra):
    made = tokenizer(extra)
    text = f"<s>{SAID}<|im_end|>"
    assert decode(made, ids(made, text), keep_special=True) == text


@pytest.mark.parametrize("special", [True, False])
def test_ids_beyond_a_gap_decode_as_the_tokenizer_says(special):
    made = tokenizer(TAGS, first=300, special=special)
    assert len(made) == 263  # fewer than the largest id
    assert decode(made, ids(made, SAID)) == SAID


def test_ids_without_a_token_decode_to_nothing():
    made = tokenizer(TAGS, first=300)
    four = ids(made, "4")
    assert decode_all(made, [[*four, 280, *four, 5000], [], [262]]) == ["44", "", ""]


def test_a_tag_that_is_added_later_is_seen():
    made = tokenizer()
    assert decode(made, ids(made, "<answer>4</answer>")) == "<answer>4</answer>"  # bytes
    made.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS], special_tokens=True)
    assert decode(made, ids(made, "<answer>4</answer>")) == "<answer>4</answer>"
