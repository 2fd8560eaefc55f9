"""A real vLLM server: `make engine` runs these in the environment that KENPO_ENGINE_PYTHON names."""

import os
import signal
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import pytest
import torch

from kenpo.engines.base import Request, SamplingOptions
from kenpo.engines.vllm import ServerOptions, VLLMEngine
from kenpo.models.loading import load_model

PYTHON = os.environ.get("KENPO_ENGINE_PYTHON", "")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not PYTHON, reason="KENPO_ENGINE_PYTHON names no interpreter with vLLM; make engine builds one"),
]
LIMIT = 600.0


@pytest.fixture(scope="module")
def policy():
    return load_model("bundled", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def engine(policy):
    with VLLMEngine(*policy, ServerOptions(python=PYTHON, limit=LIMIT)) as made:
        yield made


def requests(policy, count, repeat=1):
    """Prompts of `repeat` sums, each wanted with a seed of its own."""
    ids = [policy[1](f"{i + 12}+{7 * i + 31}=" * repeat, add_special_tokens=False)["input_ids"] for i in range(8)]
    options = SamplingOptions(max_tokens=40)
    return [Request(tuple(ids[i % 8]), seed=2**62 + i, options=options) for i in range(count)]


@torch.no_grad()
def gap(model, episodes):
    """The largest difference between the model's log-probs and the recorded ones."""
    worst = 0.0
    for e in episodes:
        ids = torch.tensor([e.prompt + e.tokens])
        logp = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0][len(e.prompt) - 1 :]
        worst = max(worst, float((logp - torch.tensor(e.logp)).abs().max()))
    return worst


@pytest.mark.parametrize("repeat", [1, 24])  # 24: prompts above 128 tokens, the prefix cache's block on a CPU
def test_log_probs_are_the_models_before_and_after_updates(repeat, policy, engine):
    model = policy[0]
    asked = requests(policy, 32, repeat)
    assert repeat == 1 or min(len(r.prompt) for r in asked) >= 128
    start = {n: t.clone() for n, t in model.state_dict().items()}
    try:
        first = engine.sample(asked)
        assert [e.tokens for e in engine.sample(asked)] == [e.tokens for e in first]
        assert gap(model, first) < 1e-4
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.data.add_(0.02 * torch.randn(p.shape, generator=generator))
        assert gap(model, first) > 0.1
        engine.update(lambda: iter(model.state_dict().items()), engine.version + 1)
        moved = engine.sample(asked)
        assert gap(model, moved) < 1e-4
        assert {e.version for e in moved} == {engine.version}
    finally:
        model.load_state_dict(start)
        engine.update(lambda: iter(start.items()), engine.version + 1)


def test_a_killed_server_owes_nothing_and_leaves_nothing(policy, engine):
    asked = requests(policy, 64)
    want = [e.tokens for e in engine.sample(asked)]
    group = engine.process.pid
    futures = engine.submit(asked * 4)
    wait(futures, return_when=FIRST_COMPLETED)
    os.kill(group, signal.SIGKILL)
    assert [f.result().tokens for f in futures] == want * 4
    assert engine.restarts >= 1
    assert not any(_group(p) == group for p in Path("/proc").iterdir() if p.name.isdigit())


def _group(process):
    """The process group of a live process; 0 where it has ended."""
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return 0
    return 0 if state == "Z" else int(group)
