"""Supervised training: which tokens are trained on, the loss, its independence of the split, and the folder written."""

import contextlib
import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kenpo.cli import main
from kenpo.errors import InputError, RunError
from kenpo.experience.addition import character_tokenizer
from kenpo.models.scorer import Scorer
from kenpo.trainer.demonstrations import FileSource, Row, Text, collate, encode
from kenpo.trainer.fresh import Architecture
from kenpo.trainer.sft import accumulate, run, token_mean_loss
from kenpo.trainer.sft_config import SFTConfig, resolve

TINY = {"fresh": "gpt2", "hidden": 16, "layers": 2, "heads": 2, "context": 64}
ROWS = [Row([3, 4, 5, 6, 1], 2), Row([7, 8, 9, 10, 11, 12, 1], 3), Row([3, 1], 1), Row([4, 4, 4, 9, 1], 4)]
AS_IS = contextlib.nullcontext()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    return (
        Architecture("gpt2", hidden=16, layers=2, heads=2, context=64).build(character_tokenizer(), 0).double().eval()
    )


# masks


def test_only_response_tokens_are_trained_on():
    """ids [p,p,a,b]: the log-probs of a and b only, each from the position before it."""
    tokens, mask = collate([Row([20, 21, 5, 6], 2)])
    assert tokens.tolist() == [[20, 21, 5, 6]]
    assert mask.tolist() == [[False, False, True, True]]
    assert mask[:, 1:].tolist() == [[False, True, True]]  # what a shifted mask would be


def test_each_row_has_its_own_response_range():
    """Lengths 5 and 4 with prompts of 2 and 1: in one line of tokens the responses are 2..4 and 6..8."""
    _, mask = collate([Row([1, 2, 3, 4, 5], 2), Row([6, 7, 8, 9], 1)])
    assert mask.tolist() == [[False, False, True, True, True], [False, True, True, True, False]]
    in_line = torch.cat([mask[0, :5], mask[1, :4]])
    assert in_line.nonzero().flatten().tolist() == [2, 3, 4, 6, 7, 8]


def test_an_end_id_equal_to_the_pad_id_stays_trained():
    tokens, mask = collate([Row([5, 6, 2], 1), Row([5, 6, 7, 8, 2], 1)])
    assert mask.tolist()[0] == [False, True, True, False, False]
    assert tokens.tolist()[0] == [5, 6, 2, -1, -1]


def test_encoding_ends_with_the_end_id_and_counts_the_prompt():
    tokenizer = character_tokenizer()
    row = encode(tokenizer, Text("1+2=", "#3", "row 1"), 64)
    assert tokenizer.decode(row.ids) == "1+2=#3<eos>"
    assert row.prompt == 4


# loss


def reference_loss(model, rows):
    """Mean of -log p over all response tokens, one unpadded row at a time, in plain Python."""
    total, count = 0.0, 0
    for ids, prompt in rows:
        logits = model(torch.tensor([ids])).logits[0].tolist()
        for t in range(prompt, len(ids)):
            highest = max(logits[t - 1])
            partition = sum(math.exp(x - highest) for x in logits[t - 1])
            total -= logits[t - 1][ids[t]] - highest - math.log(partition)
            count += 1
    return total / count


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 100])
def test_loss_is_the_token_mean_of_the_whole_batch(model, micro_batch):
    assert accumulate(Scorer(model), ROWS, micro_batch, AS_IS) == pytest.approx(reference_loss(model, ROWS), abs=1e-12)


def test_gradient_does_not_depend_on_the_split(model):
    gradients = []
    for micro_batch in (1, 3, len(ROWS)):
        model.zero_grad()
        accumulate(Scorer(model), ROWS, micro_batch, AS_IS)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-12 * gradients[0].norm()


def test_row_order_changes_nothing(model):
    assert accumulate(Scorer(model), ROWS[::-1], 2, AS_IS) == pytest.approx(
        accumulate(Scorer(model), ROWS, 2, AS_IS), abs=1e-12
    )


def test_prompt_tokens_get_no_gradient_from_their_own_prediction(model):
    """The embedding of the head at prompt-only targets: moving the prompt's logits changes no loss."""
    loss = token_mean_loss(Scorer(model), [Row([3, 4, 5], 2)], 1)
    alone = -torch.log_softmax(model(torch.tensor([[3, 4]])).logits[0, -1], -1)[5]
    assert loss.item() == pytest.approx(alone.item(), abs=1e-12)


# runs


def tiny(tmp_path, **options):
    return SFTConfig(
        **{**TINY, "out": str(tmp_path / "model"), "steps": 3, "batch": 4, "threads": 1, "eval_problems": 8,
           "eval_tokens": 4, "quiet": True, **options}
    )  # fmt: skip


def quietly(config):
    return run(config, report=lambda line: None)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_three_steps_write_a_loadable_folder(tmp_path, family):
    summary = quietly(tiny(tmp_path, fresh=family, kv_heads=1))
    out = tmp_path / "model"
    assert 0 <= summary["eval"]["after"] <= 1
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == family
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("864+394=")["input_ids"]) == "864+394="
    assert len(tokenizer("864+394=")["input_ids"]) == 8
    recorded = json.loads((out / "sft" / "config.json").read_text())
    assert recorded["micro_batch"] == 4
    assert recorded["dropped_carry"] == 0.6
    losses = [json.loads(line) for line in (out / "sft" / "losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) for line in losses)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_same_run_gives_the_same_weights_and_another_seed_others(tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        quietly(tiny(tmp_path, out=str(tmp_path / name), seed=seed, eval_problems=0))
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_training_lowers_the_loss_and_goes_on_from_a_folder_and_a_file(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i}+{i}=", "r": f"#{2 * i}"}) + "\n" for i in range(5)))
    quietly(tiny(tmp_path, out=str(tmp_path / "first"), eval_problems=0))
    quietly(
        SFTConfig(model=str(tmp_path / "first"), data=str(data), prompt_column="q", response_column="r", steps=30,
                  batch=5, lr=1e-2, warmup=0, threads=1, quiet=True, out=str(tmp_path / "second"))
    )  # fmt: skip
    losses = [json.loads(line)["loss"] for line in (tmp_path / "second" / "sft" / "losses.jsonl").open()]
    assert losses[-1] < 0.5 * losses[0]


def test_a_tied_head_is_written_explicitly(tmp_path):
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer()
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=64, vocab_size=len(tokenizer), eos_token_id=1)
    tied = GPT2LMHeadModel(config)
    tied.save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    quietly(SFTConfig(model=str(tmp_path / "tied"), steps=1, batch=2, threads=1, eval_problems=0, quiet=True,
                      out=str(tmp_path / "out")))  # fmt: skip
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.transformer.wte.weight


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": str(i), "response": "1"}) + "\n" for i in range(20)))
    source = FileSource(str(data), "prompt", "response", seed=0)
    first = [source.text(i).prompt for i in range(20)]
    second = [source.text(i).prompt for i in range(20, 40)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert [source.text(i).prompt for i in range(20)] == first
    assert FileSource(str(data), "prompt", "response", seed=1).text(0) is not None


def test_bfloat16_runs_under_autocast_and_keeps_float32_weights(tmp_path):
    quietly(tiny(tmp_path, dtype="bfloat16", eval_problems=0))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").lm_head.weight.dtype == torch.float32


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kenpo.runs.checkpoint.save_model", full)
    with pytest.raises(RunError, match="disk is full"):
        quietly(tiny(tmp_path, eval_problems=0))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("kenpo.trainer.sft.accumulate", lambda *_: math.nan)
    with pytest.raises(RunError, match="step 1: loss nan"):
        quietly(tiny(tmp_path, eval_problems=0))


# fresh models


def test_the_default_fresh_model_is_the_bundled_size():
    config = resolve(SFTConfig(out="x", fresh="qwen3"))
    assert (config.hidden, config.layers, config.heads, config.kv_heads, config.ffn) == (192, 4, 4, 2, 512)


def test_fresh_weights_depend_on_the_seed_and_leave_the_global_stream_alone():
    tokenizer = character_tokenizer()
    shape = Architecture("qwen3", hidden=8, layers=1, heads=2, kv_heads=1)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    models = [shape.build(tokenizer, seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(1), expected)
    heads = [m.lm_head.weight for m in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


# bad input: one line, exit status 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --model FOLDER or --fresh"),
        (["--fresh", "qwen3", "--model", "x"], "either --model FOLDER or --fresh"),
        (["--model", "x", "--hidden", "8"], "--hidden describes a fresh model"),
        (["--fresh", "qwen3", "--hidden", "10", "--heads", "4"], "not a multiple of heads"),
        (["--fresh", "qwen3", "--heads", "4", "--kv-heads", "3"], "not a multiple of kv-heads"),
        (["--fresh", "gpt2", "--kv-heads", "2"], "leave --kv-heads out"),
        (["--fresh", "qwen3", "--steps", "0"], "--steps: 0 is below"),
        (["--fresh", "qwen3", "--lr", "-1"], "--lr: -1.0 is not a positive number"),
        (["--fresh", "qwen3", "--lr", "nan"], "--lr: nan is not a positive number"),
        (["--fresh", "qwen3", "--dropped-carry", "1.5"], "--dropped-carry: 1.5"),
        (["--fresh", "qwen3", "--prompt-column", "q"], "--prompt-column names a column of a file"),
        (["--fresh", "qwen3", "--data", "x.jsonl"], "needs a tokenizer folder"),
        (
            ["--model", "bundled", "--data", "x.jsonl", "--dropped-carry", "0"],
            "--dropped-carry belongs to the addition",
        ),
        (["--fresh", "mamba"], "mamba"),
        (["--fresh", "qwen3", "--nonsense", "1"], "nonsense"),
    ],
)
def test_bad_options(arguments, message, tmp_path, capsys):
    status = main(["sft", *arguments, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json\n", "line 1"),
        ("[1]\n", "line 1"),
        ('{"prompt": "1+1="}\n', "no column 'response'"),
        ('{"prompt": "1+1=", "response": "2"}\n{"prompt": "", "response": "2"}\n', "line 2: column 'prompt'"),
        ('{"prompt": "1+1=", "response": 2}\n', "line 1: column 'response'"),
        ('{"prompt": "1+1=", "response": "two"}\n', "line 1: holds characters"),
        (json.dumps({"prompt": "1+1=", "response": "2" * 100}) + "\n", "do not fit the model's context of 64"),
    ],
)
def test_bad_files(text, message, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text(text)
    folder = tmp_path / "tokenizer"
    character_tokenizer().save_pretrained(folder)
    config = tiny(tmp_path, data=str(data), tokenizer=str(folder), eval_problems=0)
    with pytest.raises(InputError) as caught:
        quietly(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_existing_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="exists"):
        quietly(tiny(tmp_path))


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit) as left:
        main(["sft", "--help"])
    assert left.value.code == 0
    assert "kenpo sft --fresh qwen3 --out" in capsys.readouterr().out


def test_training_does_not_change_the_model_it_was_handed(model):
    before = copy.deepcopy(model.state_dict())
    accumulate(Scorer(model), ROWS, 2, AS_IS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
