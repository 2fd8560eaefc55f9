"""Chat templates: one of a file, none, with arguments, without a system role; prompts that are rendered already."""

import pytest

from kenpo.errors import InputError
from kenpo.models.loading import encode_prompt, load_model
from kenpo.models.templates import has_system_role, rendered_already, set_template

PLAIN = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
THINKS = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}"
    "{% if enable_thinking is defined and enable_thinking is false %}+{% else %}={% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}="
)
SILENT = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}="


@pytest.fixture
def tokenizer():
    """Byte-level, with ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ends = ["<|im_start|>", "<|im_end|>"]
    t = Tokenizer(models.BPE(vocab=vocab | {s: 256 + i for i, s in enumerate(ends)}, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ends])
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", bos_token="<|im_start|>")


def text(tokenizer, prompt, system=None):
    return tokenizer.decode(encode_prompt(tokenizer, prompt, system))


def test_a_file_none_and_the_models_own(tokenizer, tmp_path):
    tokenizer.chat_template = THINKS
    set_template(tokenizer)
    assert text(tokenizer, "1") == "1="
    (tmp_path / "t.jinja").write_text(PLAIN + "!")
    set_template(tokenizer, str(tmp_path / "t.jinja"))
    assert text(tokenizer, "1") == "1=!"
    set_template(tokenizer, "none")
    assert text(tokenizer, "1") == "1"


def test_arguments_are_the_templates_defaults_and_a_callers_value_wins(tokenizer):
    for template in (THINKS, "\n" + THINKS):
        tokenizer.chat_template = template
        plain = text(tokenizer, "1")
        set_template(tokenizer, arguments={"enable_thinking": False})
        assert text(tokenizer, "1") == plain.replace("=", "+")
        once = tokenizer.chat_template
        set_template(tokenizer, arguments={"enable_thinking": False})  # as a resumed run does
        assert tokenizer.chat_template == once
        messages = [{"role": "user", "content": "1"}]
        asked = {"add_generation_prompt": True, "tokenize": False}
        assert tokenizer.apply_chat_template(messages, enable_thinking=True, **asked) == plain


@pytest.mark.parametrize("value", ['"quoted" \\ text', "ü🙂{{ x }}", 3, 0.5, True])
def test_values_arrive_as_they_are(tokenizer, value):
    tokenizer.chat_template = PLAIN + "{{ extra }}"
    set_template(tokenizer, arguments={"extra": value})
    assert text(tokenizer, "1") == f"1={value}"


def test_what_a_template_does_not_read_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = "{% generation %}" + THINKS + "{% endgeneration %}"
    with pytest.raises(InputError, match=r"thinking: the chat template does not read it \(it reads: enable_thinking\)"):
        set_template(tokenizer, arguments={"thinking": False})
    with pytest.raises(InputError, match="a text, a number, true or false"):
        set_template(tokenizer, arguments={"enable_thinking": [1]})
    with pytest.raises(InputError, match="no chat template that could read them"):
        set_template(tokenizer, "none", {"enable_thinking": False})
    for content, words in ((b"{% for m in messages %}", "line 1"), (b"x", "messages"), (b"\xff", "can't be read")):
        (tmp_path / "t.jinja").write_bytes(content)
        with pytest.raises(InputError, match=words) as caught:
            set_template(tokenizer, str(tmp_path / "t.jinja"))
        assert "t.jinja" in str(caught.value)
    with pytest.raises(InputError, match="can't be read"):
        set_template(tokenizer, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT])
def test_a_system_prompt_stands_in_the_first_user_message_where_there_is_no_role_for_it(tokenizer, template):
    tokenizer.chat_template = template
    assert not has_system_role(tokenizer)
    assert text(tokenizer, "1", "Add.") == "Add.\n\n1="
    chat = [
        {"role": "system", "content": "Add."},
        *({"role": role, "content": said} for role, said in (("user", "1"), ("assistant", "2"), ("user", "3"))),
    ]
    assert text(tokenizer, chat) == "Add.\n\n123="
    tokenizer.chat_template = PLAIN
    assert has_system_role(tokenizer)
    assert text(tokenizer, "1", "Add.") == "Add.=1="


def test_a_prompt_that_is_rendered_already_is_noticed_and_its_beginning_is_not_doubled(tokenizer):
    rendered = "<|im_start|>user\nhi<|im_end|>\n"
    assert rendered_already(tokenizer, rendered) is None  # nothing would be rendered again
    tokenizer.chat_template = PLAIN
    assert rendered_already(tokenizer, rendered) in rendered
    assert rendered_already(tokenizer, [{"role": "user", "content": rendered}]) in rendered
    assert rendered_already(tokenizer, "what does <b> mean?") is None
    set_template(tokenizer, "none")
    assert text(tokenizer, rendered) == rendered


def test_the_bundled_models_prompts_stay_as_they_were():
    _, tokenizer = load_model("bundled")
    before = encode_prompt(tokenizer, "1+2=")
    set_template(tokenizer)
    assert encode_prompt(tokenizer, "1+2=") == before
