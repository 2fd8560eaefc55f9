"""Code in a model folder never runs, whatever standard input says: a marker file that it would write stays absent."""

import json
import os
import shutil
import subprocess
import sys

import pytest

MARK = "import pathlib\npathlib.Path({marker!r}).write_text('ran')\n"
CONFIG_CODE = MARK + "from transformers import LlamaConfig\nclass Own(LlamaConfig):\n    model_type = 'own_kind'\n"
MODEL_CODE = MARK + "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM):\n    pass\n"
TOKENIZER_CODE = (
    MARK + "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
)
TEMPLATE = (
    "{{ cycler.__init__.__globals__.os.system('touch {marker}') }}"
    "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages[0]['content'] }}"
)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model folder that opens."""
    from tests.tiny import byte_tokenizer, llama

    folder = tmp_path_factory.mktemp("models") / "plain"
    tokenizer = byte_tokenizer()
    llama(vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "ran"


def own_code(kind, plain, folder, marker):
    """A folder that names code of its own at one place, and the word by which it is refused (None: it opens)."""
    shutil.copytree(plain, folder)
    text = {"marker": str(marker)}
    if kind == "config":
        (folder / "own.py").write_text(CONFIG_CODE.format(**text))
        edit(folder / "config.json", model_type="own_kind", auto_map={"AutoConfig": "own.Own"})
        return "config.json needs Python code"
    if kind == "model":
        (folder / "own.py").write_text(MODEL_CODE.format(**text))
        edit(folder / "config.json", model_type="vit", auto_map={"AutoModelForCausalLM": "own.Own"})
        return "not a causal language model"
    if kind == "model of a known kind":
        (folder / "own.py").write_text(MODEL_CODE.format(**text))
        edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.Own"})
        return None
    if kind == "kernel":
        edit(folder / "config.json", attn_implementation="somebody/attention")
        return "somebody/attention"
    if kind == "tokenizer":
        (folder / "own.py").write_text(TOKENIZER_CODE.format(**text))
        edit(
            folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}
        )
        return "the tokenizer needs Python code"
    if kind == "template":
        template = TEMPLATE.replace("{marker}", str(marker))
        (folder / "chat_template.jinja").write_text(template)
        return "the chat template refuses"
    if kind == "generate":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(MARK.format(**text) + "def generate(model): ...\n")
        return None
    raise AssertionError(kind)


def adapter(base, folder, **changes):
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", **changes}))
    return folder


KINDS = ("config", "model", "model of a known kind", "kernel", "tokenizer", "template", "generate")


def load_and_encode(folder):
    from kenpo.models.loading import encode_prompt, load_model

    _, tokenizer = load_model(folder)
    return encode_prompt(tokenizer, "1+2=")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_code_of_its_own(kind, plain, tmp_path, marker, monkeypatch):
    import io

    from kenpo.errors import InputError

    word = own_code(kind, plain, tmp_path / "model", marker)
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", answers)
    if word is None:
        assert load_and_encode(tmp_path / "model")
    else:
        with pytest.raises(InputError, match=word.replace(".", r"\.")) as refused:
            load_and_encode(tmp_path / "model")
        assert "\n" not in str(refused.value)
        assert kind == "template" or str(tmp_path / "model") in str(refused.value)
    assert not marker.exists()
    assert answers.tell() == 0  # nothing was read


@pytest.mark.parametrize("kind", ["config", "tokenizer"])
def test_an_adapter_whose_base_has_code_of_its_own(kind, plain, tmp_path, marker):
    from kenpo.errors import InputError
    from kenpo.models.loading import load_model

    own_code(kind, plain, tmp_path / "base", marker)
    with pytest.raises(InputError, match="needs Python code"):
        load_model(adapter(tmp_path / "base", tmp_path / "adapter"))
    assert not marker.exists()


def test_an_adapter_that_names_a_module(plain, tmp_path, marker, monkeypatch):
    from kenpo.errors import InputError
    from kenpo.models.loading import load_model

    (tmp_path / "evil_core.py").write_text(MARK.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    folder = adapter(plain, tmp_path / "adapter", megatron_config={"x": 1}, megatron_core="evil_core")
    with pytest.raises(InputError, match="megatron_config"):
        load_model(folder)
    assert not marker.exists()


def test_adapters_that_lead_nowhere(plain, tmp_path):
    from kenpo.errors import InputError
    from kenpo.models.loading import load_model

    itself = adapter(tmp_path / "itself", tmp_path / "itself")
    with pytest.raises(InputError, match="is an adapter as well"):
        load_model(itself)
    (itself / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        load_model(itself)
    with pytest.raises(InputError, match="names no base model"):
        load_model(adapter(plain, tmp_path / "number", base_model_name_or_path=7))


COMMANDS = {
    "train": ["train", "--model", "FOLDER", "--task", "TASK", "--steps", "1", "--out", "RUN"],
    "train --dry-run": ["train", "--model", "FOLDER", "--task", "TASK", "--dry-run"],
    "eval": ["eval", "FOLDER", "--task", "TASK"],
    "sample": ["sample", "FOLDER"],
    "sft": ["sft", "--model", "FOLDER", "--data", "PAIRS", "--steps", "1", "--batch", "1", "--out", "RUN"],
}  # fmt: skip


def run(command, folder, tmp_path):
    """The command in a process of its own, with a pipe that says yes to everything."""
    (tmp_path / "task.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(10)))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    places = {"FOLDER": folder, "TASK": "task.jsonl", "PAIRS": "pairs.jsonl", "RUN": "run"}
    args = [str(places.get(word, word)) for word in COMMANDS[command]]
    return subprocess.run(
        [sys.executable, "-m", "kenpo", *args], input="y\n" * 20, capture_output=True, text=True, cwd=tmp_path,
        timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip


def check_command(command, kind, plain, tmp_path, marker):
    if kind == "adapter":
        own_code("config", plain, tmp_path / "base", marker)
        adapter(tmp_path / "base", tmp_path / "model")
    else:
        own_code(kind, plain, tmp_path / "model", marker)
    done = run(command, tmp_path / "model", tmp_path)
    assert not marker.exists()
    assert "y/N" not in done.stdout + done.stderr
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_command_with_a_pipe_that_says_yes(plain, tmp_path, marker):
    check_command("sample", "config", plain, tmp_path, marker)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["config", "model", "tokenizer", "template", "adapter"])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_with_a_pipe_that_says_yes(command, kind, plain, tmp_path, marker):
    check_command(command, kind, plain, tmp_path, marker)
