"""`kenpo sft`: masks, the loss of the whole batch, runs with all that a run has, and bad input."""

import json
import math
import subprocess
import sys

import pytest
import torch
from fresh_model import Architecture, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import kenpo
from kenpo.batches import load_rollouts
from kenpo.cli import main
from kenpo.errors import InputError, RunError
from kenpo.experience.addition import character_tokenizer
from kenpo.experience.demonstrations import (
    AdditionTexts,
    DemonstrationOptions,
    Demonstrations,
    FileTexts,
    Text,
    encode,
    split,
)  # fmt: skip
from kenpo.learner.learner import Learner
from kenpo.models.scorer import Scorer
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.loop import train

SHAPE = Architecture("gpt2", hidden=16, layers=2, heads=2, context=64)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "model"
    write(SHAPE, str(folder))
    return str(folder)


@pytest.fixture
def model():
    return SHAPE.build(character_tokenizer(), 0).double().eval()


def pairs(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(texts, batch=4, context=64, evaluator=None):
    return Demonstrations(texts, character_tokenizer(), context, DemonstrationOptions(batch), evaluator)


class Texts:
    """These texts, over and over."""

    def __init__(self, *rows, heldout=()):
        self.rows, self.heldout = [Text(p, r, "row") for p, r in rows], [Text(p, r, "row") for p, r in heldout]

    def text(self, index):
        return self.rows[index % len(self.rows)]


ROWS = [("1+2=", "#3"), ("12+13=", "2+3+0=05#25"), ("1", "2"), ("9+9=", "18")]


# masks


def test_only_response_tokens_and_their_end_are_trained_on():
    batch = source(Texts(*ROWS)).next(1, None).rollouts
    tokenizer = character_tokenizer()
    for row, (prompt, response) in enumerate(ROWS):
        assert tokenizer.decode(batch.tokens[row][batch.mask[row]]) == response + "<eos>"
        assert int(batch.mask[row].int().argmax()) == len(prompt)
        assert (batch.tokens[row] >= 0).sum() == len(prompt) + len(response) + 1
    assert batch.logp_sampler is None
    assert batch.group.tolist() == [0, 1, 2, 3]


def test_encoding_ends_with_the_end_id():
    episode = encode(character_tokenizer(), Text("1+2=", "#3", "row 1"), 64)
    assert len(episode.prompt) == 4
    assert character_tokenizer().decode(episode.tokens) == "#3<eos>"


def test_the_cursor_is_all_the_state():
    texts = AdditionTexts(3, 0.6)
    s = source(texts)
    first, second = s.next(1, None), s.next(2, {"cursor": 4})
    assert (first.state, second.state) == ({"cursor": 4}, {"cursor": 8})
    assert second.rollouts.prompt_id.tolist() == [4, 5, 6, 7]
    assert torch.equal(s.next(9, {"cursor": 4}).rollouts.tokens, second.rollouts.tokens)
    with pytest.raises(InputError, match="read in order"):
        s.next(1, None, usable=lambda batch: batch.rewards == 0)


# loss


def reference_loss(model, rollouts):
    """Mean of -log p over all response tokens, one unpadded row at a time, in plain Python."""
    total, count = 0.0, 0
    for row, mask in zip(rollouts.tokens.tolist(), rollouts.mask.tolist(), strict=True):
        ids = [i for i in row if i >= 0]
        logits = model(torch.tensor([ids])).logits[0].tolist()
        for t in range(len(ids)):
            if mask[t]:
                highest = max(logits[t - 1])
                partition = sum(math.exp(x - highest) for x in logits[t - 1])
                total -= logits[t - 1][ids[t]] - highest - math.log(partition)
                count += 1
    return total / count


@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_loss_and_gradient_are_the_token_mean_of_the_whole_batch(model, budget):
    from kenpo.learner.learner import LearnerOptions

    batch = source(Texts(*ROWS)).next(1, None).rollouts
    wide = kenpo.Rollouts(**{n: v.double() if v.is_floating_point() else v for n, v in batch.tensors().items()})
    learner = Learner(Scorer(model), LearnerOptions(budget))
    sums, _ = learner.gradient(kenpo.prepare(kenpo.get("sft"), wide), kenpo.get("sft")).read(learner.ranks)
    assert sums["loss"][0] == pytest.approx(reference_loss(model, wide), abs=1e-12)
    mine = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    model.zero_grad()
    rows = [
        (torch.tensor([[i for i in row if i >= 0]]), m) for row, m in zip(wide.tokens.tolist(), wide.mask, strict=True)
    ]
    losses = []
    for ids, m in rows:
        logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        losses.append(-logp[m[1 : ids.shape[1]]].sum())
    (torch.stack(losses).sum() / wide.mask.sum()).backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (mine - theirs).norm() <= 1e-11 * theirs.norm()


# runs


def options(start, tmp_path, **more):
    return {"model": start, "algorithm": "sft", "steps": 4, "prompts": 4, "eval_problems": 6, "max_tokens": 4,
            "checkpoint_every": 2, "eval_every": 2, "threads": 1, "quiet": True, "lr": 1e-2, "warmup": 0,
            "out": str(tmp_path / "run"), **more}  # fmt: skip


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_a_run_on_the_addition_task_has_all_that_a_run_has(start, tmp_path):
    summary = train(TrainConfig(**options(start, tmp_path)))
    run = tmp_path / "run"
    assert 0 <= summary["eval"]["after"] <= 1
    assert summary["eval_figure"] == "eval/accuracy"
    assert [line["step"] for line in lines(run)] == [0, 1, 2, 3, 4]
    last = found(run / "checkpoints")[-1]
    assert last.name == "step_000004"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(last), AutoTokenizer.from_pretrained(last)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    recorded = json.loads((run / "config.json").read_text())
    assert (recorded["source"], recorded["group_size"], recorded["eval_task"]) == ("demonstrations", 1, "addition")
    assert load_rollouts(run / "batches" / "000001.safetensors").prompt_id.tolist() == [0, 1, 2, 3]
    assert summary["tokens"]["trained"] == sum(line["tokens"]["trained"] for line in lines(run)[1:]) > 0


def test_resume_is_bit_for_bit(start, tmp_path):
    """Six steps at once, and three, a checkpoint and three more: the same bytes."""
    data = pairs(tmp_path / "d.jsonl", [{"prompt": f"{i}+{i}=", "response": f"#{2 * i}"} for i in range(9)])
    fields = {"task": data, "eval_problems": 0, "steps": 6, "checkpoint_every": 3, "keep": 0}
    train(TrainConfig(**options(start, tmp_path, **fields, out=str(tmp_path / "whole"))))
    train(TrainConfig(**options(start, tmp_path, **fields)))
    run = tmp_path / "run"
    for name in ("summary.json", "checkpoints/step_000006"):
        subprocess.run(["rm", "-r", str(run / name)], check=True)
    train(TrainConfig(**options(start, tmp_path, **fields, resume=True)))
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        file = f"checkpoints/step_000006/{name}"
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    untimed = [[{k: v for k, v in line.items() if k != "time"} for line in lines(p)] for p in (run, tmp_path / "whole")]
    assert untimed[0] == untimed[1]


def test_training_on_a_file_lowers_loss_and_held_out_loss_is_named(start, tmp_path):
    data = pairs(tmp_path / "d.jsonl", [{"q": f"{i}+1=", "r": f"#{i + 1}"} for i in range(20)])
    fields = {"task": data, "prompt_column": "q", "response_column": "r", "steps": 30, "prompts": 8, "eval_every": 0}
    summary = train(TrainConfig(**options(start, tmp_path, **fields)))
    assert summary["eval_figure"] == "eval/loss"
    assert summary["eval"]["after"] < 0.7 * summary["eval"]["before"]
    losses = [line["loss"] for line in lines(tmp_path / "run") if "loss" in line]
    assert losses[-1]["sum"] < 0.7 * losses[0]["sum"]


def test_the_held_out_loss_is_the_mean_over_tokens(model):
    held = [("1+1=", "2"), ("2+2=", "#4#4#4")]
    s = source(Texts(*ROWS, heldout=held))
    figures = s.measure(Scorer(model).terms)
    batch = source(Texts(*held), batch=2).next(1, None).rollouts
    assert figures["eval/loss"]["count"] == int(batch.mask.sum()) == 2 + 7
    assert figures["eval/loss"]["sum"] / 9 == pytest.approx(reference_loss(model, batch), abs=1e-9)


def test_lora_packing_and_budget_belong_to_it_too(start, tmp_path):
    fields = {"lora_rank": 2, "packing": "on", "microbatch_tokens": 64, "eval_problems": 0, "steps": 2, "seed": 1}
    llama = tmp_path / "llama"
    write(Architecture("llama", hidden=16, layers=1, heads=2, context=64), str(llama))
    train(TrainConfig(**options(str(llama), tmp_path, **fields)))
    assert (found(tmp_path / "run" / "checkpoints")[-1] / "trainer" / "adapter").is_dir()


def test_two_ranks_train_what_one_does(start, tmp_path):
    """The loss of each step agrees to rounding; the work was shared."""
    arguments = ["sft", "--model", start, "--steps", "3", "--batch", "5", "--eval-problems", "0", "--threads", "1",
                 "--lr", "1e-3", "--quiet", "--dtype", "float64"]  # fmt: skip
    main([*arguments, "--out", str(tmp_path / "one")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29611"]
    two = subprocess.run(
        [*launcher, "-m", "kenpo", *arguments, "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert two.returncode == 0, two.stderr[-2000:]
    for a, b in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert a["loss"]["sum"] == pytest.approx(b["loss"]["sum"], abs=1e-12)
        assert a["tokens"] == b["tokens"]


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order(tmp_path):
    data = pairs(tmp_path / "p.jsonl", [{"prompt": str(i), "response": "1"} for i in range(20)])
    texts = FileTexts(data, "prompt", "response", seed=0)
    first = [texts.text(i).prompt for i in range(20)]
    second = [texts.text(i).prompt for i in range(20, 40)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert [texts.text(i).prompt for i in range(20)] == first
    assert [FileTexts(data, "prompt", "response", seed=1).text(i).prompt for i in range(20)] != first


def test_held_out_rows_are_never_trained_on_and_prompts_stay_on_one_side():
    rows = [Text(str(i // 2), str(i), "") for i in range(40)]
    train_rows, held = split(rows, 6)
    assert len(held) == 6
    assert len(train_rows) == 34
    assert not {r.prompt for r in held} & {r.prompt for r in train_rows}
    assert split(rows, 0)[1] == []
    assert len(split(rows[:4], 99)[1]) == 0


def test_a_full_disk_is_named_and_leaves_what_was_saved(start, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kenpo.runs.checkpoint.save_model", full)
    with pytest.raises(RunError, match="disk is full"):
        train(TrainConfig(**options(start, tmp_path, eval_problems=0)))
    assert found(tmp_path / "run" / "checkpoints") == []


def test_a_tied_head_is_written_explicitly(tmp_path):
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer()
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=64, vocab_size=len(tokenizer), eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    train(TrainConfig(**options(str(tmp_path / "tied"), tmp_path, steps=1, eval_problems=0)))
    last = found(tmp_path / "run" / "checkpoints")[-1]
    weights = load_file(last / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])


# fresh models


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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 10, "heads": 4}, "not a multiple of heads"),
        ({"heads": 4, "kv_heads": 3}, "not a multiple of kv-heads"),
        ({"family": "gpt2", "kv_heads": 2}, "leave --kv-heads out"),
        ({"family": "mamba"}, "mamba"),
    ],
)
def test_shapes_that_cannot_be(sizes, message):
    with pytest.raises(InputError, match=message):
        Architecture(**{"family": "qwen3", **sizes})


# bad input: one line, exit status 2, nothing left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: 0 is below"),
        (["--lr", "-1"], "--lr: -1.0 is below"),
        (["--lr", "nan"], "--lr: nan"),
        (["--dropped-carry", "1.5"], "--dropped-carry: 1.5"),
        (["--prompt-column", "q"], "name a file's parts"),
        (["--data", "x.jsonl", "--dropped-carry", "0"], "--dropped-carry belongs to the addition"),
        (["--group-size", "4"], "one response a prompt"),
        (["--fresh", "qwen3"], "recipes/fresh_model.py"),
        (["--micro-batch", "4"], "--microbatch-tokens"),
        (["--nonsense", "1"], "nonsense"),
        (["--source", "nowhere"], "unknown source 'nowhere'"),
        (["--algorithm", "grpo", "--source", "demonstrations"], "a group of one has nothing to compare"),
    ],
)
def test_bad_options(arguments, message, start, tmp_path, capsys):
    status = main(["sft", "--model", start, *arguments, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert status == 2, error
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_options_of_demonstrations_are_refused_without_them():
    for extra in ({"eval_task": "addition"}, {"dropped_carry": 0.1}, {"response_column": "r"}):
        with pytest.raises(InputError, match="belongs to demonstrations"):
            resolve(TrainConfig(**extra))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("not json\n", "line 1"),
        ("[1]\n", "line 1"),
        ('{"prompt": "1+1="}\n', "no column 'response'"),
        (
            '{"prompt": "1+1=", "response": "2"}\n{"prompt": "", "response": "2"}\n',
            "line 2: no prompt (column 'prompt'",
        ),
        ('{"prompt": "1+1=", "response": 2}\n', "line 1: column 'response'"),
        ('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+1=", "response": "two"}\n', "line 2: holds characters"),
        (json.dumps({"prompt": "1+1=", "response": "2" * 100}) + "\n", "do not fit the model's context of 64"),
        ('{"prompt": "1+1=", "response": "\\ud800"}\n', "line 1: the response holds"),
    ],
)
def test_bad_files_are_found_before_the_first_step(text, message, start, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text(text)
    config = TrainConfig(**options(start, tmp_path, task=str(data), eval_problems=0, steps=1, prompts=1))
    with pytest.raises(InputError) as caught:
        train(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_existing_folder_is_refused(start, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="exists"):
        train(TrainConfig(**options(start, tmp_path)))


def test_help_teaches_by_example(capsys):
    with pytest.raises(SystemExit) as left:
        main(["sft", "--help"])
    assert left.value.code == 0
    assert "kenpo sft --model MODEL_FOLDER --data pairs.jsonl" in capsys.readouterr().out
