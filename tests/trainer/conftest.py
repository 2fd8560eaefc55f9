"""Tiny model folders and a verifier with graded rewards, for runs of a second or two."""

import os
import subprocess
import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of randomly initialised models over the addition task's characters, by architecture."""
    from fresh_model import Architecture
    from transformers.utils import logging

    from kenpo.experience.addition import character_tokenizer

    logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("models")
    tokenizer = character_tokenizer()
    for family in ("gpt2", "qwen3", "llama"):
        model = Architecture(family, hidden=32, layers=2, heads=2, context=64).build(tokenizer, 0)
        model.save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
    return root


@pytest.fixture
def verifier(tmp_path):
    """A user's reward that differs from sample to sample: the share of digits in the completion."""
    path = tmp_path / "reward.py"
    path.write_text(
        "def digits(completion, answer, **kw):\n"
        "    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
    )
    return f"{path}:digits"


@pytest.fixture
def options(models, verifier):
    """Fields of a TrainConfig for a run of about a second that really moves the weights."""
    return {
        "model": str(models / "qwen3"), "verifier": verifier, "steps": 6, "prompts": 3, "group_size": 4,
        "max_tokens": 8,
        "lr": 1e-3, "eval_problems": 5, "eval_every": 2, "checkpoint_every": 2, "threads": 1,
        "settings": {"regularizers": []}, "quiet": True,
    }  # fmt: skip


@pytest.fixture
def spawn():
    """Start `kenpo ARGS` in a process of its own, on one thread; returns the Popen."""
    started = []

    def start(*args, launcher=(), **kw):
        command = [sys.executable, *launcher, "-m", "kenpo", *map(str, args)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kw
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
