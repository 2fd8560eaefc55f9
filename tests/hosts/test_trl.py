"""Kenpo's algorithms inside TRL's own GRPOTrainer. `make hosts` runs this in an environment that has TRL."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("trl", reason="runs in the environment of `make hosts`")
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]

import torch  # noqa: E402

import kenpo  # noqa: E402
from kenpo.errors import HostWarning, InputError  # noqa: E402
from kenpo.integrations.trl_config import SUPPLIED  # noqa: E402
from kenpo.stages.advantages import GroupCentred  # noqa: E402
from tests.hosts import trl_run  # noqa: E402
from tests.tiny import qwen3  # noqa: E402

FED = [n for n in kenpo.names() if kenpo.feeds(kenpo.get(n), SUPPLIED) is None]
ONE_UPDATE = [n for n in FED if kenpo.get(n).updates == 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return trl_run.model_folder(tmp_path_factory.mktemp("model"))


def test_most_of_the_catalogue_can_be_fed():
    assert len(FED) >= 62


@pytest.mark.parametrize("name", FED)
def test_two_steps_of_two_microbatches_have_the_gradient_of_the_whole_window(name, folder):
    config = {"steps_per_generation": 2} if name in ONE_UPDATE else {}
    errors, _ = trl_run.run(name, folder, **config)
    assert len(errors) == 2
    assert max(errors) < 1e-12


def test_with_trls_own_head_the_error_is_that_of_float32(tmp_path):
    folder = trl_run.model_folder(tmp_path, qwen3)  # TRL scores left-padded rows; absolute positions would shift
    for name in ("grpo", "m2po", "stapo"):
        assert max(trl_run.run(name, folder, plain=False)[0]) < 1e-5


def test_two_ranks_have_the_gradient_of_one(tmp_path):
    out = tmp_path / "two.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29611",
               "-m", "tests.hosts.trl_run", "--names", "gspo", "m2po", "--out", str(out)]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    found = json.loads(out.read_text())
    assert max(found["gspo"] + found["m2po"]) < 1e-12


def test_figures_are_averages_over_counts(folder):
    _, trainer = trl_run.run("grpo", folder, settings={"regularizers": []})
    lines = [line for line in trainer.state.log_history if "kenpo/ratio" in line]
    assert lines[0]["kenpo/ratio"] == pytest.approx(1.0)
    assert len(lines) == 2


def test_evaluation_has_figures_of_its_own_and_leaves_the_state_alone(folder):
    algorithm = kenpo.get("grpo").but(advantage=Counting(), regularizers=())
    _, trainer = trl_run.run(algorithm, folder, per_device_eval_batch_size=4)
    before = trainer._stream
    found = trainer.evaluate()
    assert trainer._stream == before == {"batches": 1, "rows": torch.tensor([32])}
    assert "eval_loss" in found
    assert any(key.startswith("eval_kenpo/") for key in trainer.state.log_history[-1])


def test_tokens_that_a_tool_wrote_are_not_trained(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def rollout(prompts, trainer):
        completions = [tokenizer("1+2=3")["input_ids"] for _ in prompts]
        for i, ids in enumerate(completions):
            ids[-1] = tokenizer(str(i % 10))["input_ids"][0]
        return {
            "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": completions,
            "logprobs": [[-1.0] * len(c) for c in completions], "env_mask": [[1, 0, 0, 1, 1] for _ in completions],
        }  # fmt: skip

    _, trainer = trl_run.run("tis", folder, rollout_func=rollout, steps=1, reward=trl_run.reward_of_length)
    rows = trainer.prepared.rollouts
    assert (rows.mask.sum(1) == 3).all()
    assert bool((rows.logp_sampler[rows.mask] == -1).all())


def test_an_adapter_trains_and_the_reference_is_the_policy_without_it(folder):
    from peft import LoraConfig

    _, trainer = trl_run.run("grpo", folder, peft=LoraConfig(r=2, target_modules=["c_attn"]))
    assert trainer.ref_model is None
    rows = trainer.prepared.rollouts
    moved = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]
    assert all(bool(p.any()) for p in moved)
    assert rows.logp_ref is not None


@dataclass(frozen=True)
class Counting(GroupCentred):
    """An advantage that hands on a number and a tensor."""

    def __call__(self, rewards, ctx, state: Any):
        made, _ = super().__call__(rewards, ctx, None)
        state = state or {"batches": 0, "rows": torch.zeros(1, dtype=torch.int64)}
        return made, {"batches": state["batches"] + 1, "rows": state["rows"] + len(rewards)}


def test_an_algorithms_state_stands_in_the_checkpoint_and_is_taken_up(folder, tmp_path):
    algorithm = kenpo.get("grpo").but(advantage=Counting(), regularizers=())
    options = {"save_strategy": "steps", "save_steps": 2, "out": str(tmp_path), "save_only_model": False}
    trl_run.run(algorithm, folder, steps=2, **options)
    assert json.loads((tmp_path / "checkpoint-2/kenpo_state.json").read_text())["state"]["batches"] == 1
    _, trainer = trl_run.run(algorithm, folder, steps=4, resume=str(tmp_path / "checkpoint-2"), **options)
    assert trainer._stream["batches"] == 2
    other = kenpo.get("gspo").but(advantage=Counting())
    with pytest.raises(InputError, match="the state of 'grpo'"):
        trl_run.run(other, folder, steps=4, resume=str(tmp_path / "checkpoint-2"), **options)


def test_what_trl_does_otherwise_is_said(folder):
    for name, what in (("dapo", "does not draw others"), ("m2po", "scored again")):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trl_run.run(name, folder, steps=1)
        assert any(issubclass(w.category, HostWarning) and what in str(w.message) for w in seen), name


def test_a_reference_of_other_weights_is_refused(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(InputError, match="TRL loaded the reference from"):
        trl_run.run("grpo", folder, model=model, steps=1)


def test_dropout_is_refused(folder):
    with pytest.raises(InputError, match="disable_dropout"):
        trl_run.run("dapo", folder, disable_dropout=False, steps=1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), [("grpo", 0), ("grpo", 1), ("m2po", 0), ("m2po", 1)])
def test_the_bundled_task_is_learnt(name, seed, tmp_path):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from kenpo.experience.addition import AdditionTask
    from kenpo.integrations.trl import KenpoGRPOTrainer
    from kenpo.models.loading import BUNDLED

    torch.set_num_threads(2)
    task = AdditionTask(seed=seed)
    problems = [task.train(i) for i in range(16 * 12)]

    def reward(completions, answer, **_):
        return [float(c.rpartition("#")[2] == a) for c, a in zip(completions, answer, strict=True)]

    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=128, num_generations=8, max_completion_length=40,
        max_steps=12, learning_rate=1e-4, adam_beta2=0.99, weight_decay=0.0, warmup_steps=10, max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup", report_to=[], save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, seed=seed, shuffle_dataset=False,
    )  # fmt: skip
    trainer = KenpoGRPOTrainer(
        algorithm=name, model=str(BUNDLED), reward_funcs=reward, args=args,
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": str(p.answer)} for p in problems]),
        processing_class=AutoTokenizer.from_pretrained(str(BUNDLED), padding_side="left"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    command = [sys.executable, "-m", "kenpo", "eval", str(tmp_path / "after"), "--task", "addition", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert accuracy(found) >= 0.9


def accuracy(found):
    """Greedy accuracy in the output of ``kenpo eval --json``."""
    return found["sets"]["addition"]["greedy"]["accuracy"] if "sets" in found else found["accuracy"]
