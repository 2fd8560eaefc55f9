"""One minibatch gives one gradient and one set of parameters, however it is cut, padded, ordered or shared out."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scoring import policy_terms

import kenpo
from kenpo.batches import save_rollouts
from kenpo.models.loading import load_model
from kenpo.ranks import Ranks
from kenpo.stages.base import Weight
from kenpo.trainer.config import TrainConfig, resolve
from kenpo.trainer.plan import plan_passes
from kenpo.types import Rollouts
from trainer.stubs import updater_of

ALGORITHMS = ["grpo", "dapo", "dr_grpo", "gspo", "sapo", "cispo"]
SETTINGS = {
    "dr_grpo": {"aggregate.length": 12},
    "dapo": {"shaping.soft_overlong.limit": 12, "shaping.soft_overlong.buffer": 4},
}


@dataclass(frozen=True)
class Likely(Weight):
    """Keeps tokens that the current policy finds likely: reads the policy, so kept counts force two phases."""

    _needs = frozenset({"logp"})

    def __call__(self, ctx):
        return (ctx.logp.detach() > -2.8).to(ctx.logp.dtype)


def algorithm_of(name):
    if name == "kept":
        return (
            kenpo.get("dapo")
            .but(name="kept", weights=(Likely(),), selection=())
            .with_settings({"aggregate.over": "kept"})
        )
    return kenpo.get(name).with_settings(SETTINGS.get(name, {}))


def make_rollouts(model, groups=4, size=3, seed=0):
    """Random prompts and responses of all lengths, with old, reference and sampler log-probs near the model's."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    tokens = torch.full((rows, 24), -1)
    mask = torch.zeros(rows, 24, dtype=torch.bool)
    for r in range(rows):
        prompt, response = int(torch.randint(2, 9, (), generator=g)), int(torch.randint(1, 15, (), generator=g))
        tokens[r, : prompt + response] = torch.randint(3, 17, (prompt + response,), generator=g)
        mask[r, prompt : prompt + response] = True
    rewards = torch.rand(rows, generator=g, dtype=torch.float64)
    batch = Rollouts(mask=mask, group=torch.arange(rows) // size, rewards=rewards, tokens=tokens)
    with torch.no_grad():
        logp = policy_terms(model, batch, temperature=0.9).logp
    noise = lambda s: logp + s * torch.randn(logp.shape, generator=g, dtype=torch.float64)  # noqa: E731
    return batch.replace(logp_old=noise(0.3), logp_ref=noise(0.3), logp_sampler=noise(0.1), truncated=mask.sum(1) >= 13)


def left_padded(batch):
    """The same rows with their padding on the left."""
    shift = (batch.tokens < 0).sum(1)
    index = (torch.arange(batch.tokens.shape[1]) - shift[:, None]) % batch.tokens.shape[1]
    return batch.replace(**{n: v.gather(1, index) for n, v in batch.tensors().items() if v.dim() == 2})


def one_step(folder, name, batch, budget=10**6, ranks=None, dtype="float64"):
    """(gradient, parameters after AdamW) of one whole-batch update, as flat vectors."""
    model, _ = load_model(str(folder), dtype=dtype)
    config = resolve(
        TrainConfig(model=str(folder), lr=1e-2, microbatch_tokens=budget, temperature=0.9, threads=1, grad_clip=0)
    )
    algorithm = algorithm_of(name)
    passes = replace(plan_passes(algorithm, config, 17), reference=False)  # the batch brings its reference log-probs
    updater = updater_of(model, algorithm, config, passes, ranks or Ranks())
    updater.update(batch, None, 1)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return grads, torch.cat([p.detach().flatten() for p in model.parameters()])


def close(a, b, gradient, parameters):
    assert (a[0] - b[0]).norm() <= gradient * b[0].norm()
    assert (a[1] - b[1]).norm() <= parameters * b[1].norm()
    assert b[0].norm() > 1e-6


@pytest.fixture(scope="module")
def gpt2_batch(models):
    return make_rollouts(load_model(str(models / "gpt2"), dtype="float64")[0])


@pytest.mark.parametrize("name", [*ALGORITHMS, "kept"])
def test_cuts_padding_and_order_change_nothing(models, gpt2_batch, name):
    folder, batch = models / "gpt2", gpt2_batch
    whole = one_step(folder, name, batch)
    shuffled = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(5))]
    for other in (
        one_step(folder, name, batch, budget=1),
        one_step(folder, name, batch, budget=3 * 24),
        one_step(folder, name, left_padded(batch)),
        one_step(folder, name, shuffled),
        one_step(folder, name, left_padded(shuffled), budget=60),
    ):
        close(other, whole, 1e-12, 1e-9)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_models_with_float32_norms_agree_to_1e_6(models, family):
    folder = models / family
    batch = make_rollouts(load_model(str(folder), dtype="float64")[0])
    whole = one_step(folder, "grpo", batch)
    for budget in (1, 72):
        close(one_step(folder, "grpo", left_padded(batch), budget=budget), whole, 1e-6, 1e-6)


@pytest.mark.parametrize("name", [*ALGORITHMS, "kept"])
def test_the_gradient_is_that_of_the_loss_itself(models, gpt2_batch, name):
    """Through coefficients or straight through autograd on the whole batch: the same gradient."""
    model, _ = load_model(str(models / "gpt2"), dtype="float64")
    policy = policy_terms(model, gpt2_batch, temperature=0.9)
    kenpo.evaluate(algorithm_of(name), gpt2_batch, policy).loss.backward()
    direct = torch.cat([p.grad.flatten() for p in model.parameters()])
    ours, _ = one_step(models / "gpt2", name, gpt2_batch, budget=48)
    assert (ours - direct).norm() <= 1e-12 * direct.norm()


def test_kept_needs_two_phases():
    assert algorithm_of("kept").two_phase(None)


def test_two_ranks_take_the_step_of_one(models, gpt2_batch, tmp_path):
    """torchrun with two processes, gradients and parameters saved by the first."""
    save_rollouts(tmp_path / "batch.safetensors", gpt2_batch)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "KENPO_OUT": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KENPO_MODEL": str(models / "gpt2"),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in [*ALGORITHMS, "kept"]:
        two = load_file(tmp_path / f"{name}.safetensors")
        close((two["grads"], two["parameters"]), one_step(models / "gpt2", name, gpt2_batch), 1e-12, 1e-9)


def _rank() -> None:
    """What each process of the two-rank test runs."""
    from kenpo.batches import load_rollouts

    torch.set_num_threads(1)
    out, ranks = Path(os.environ["KENPO_OUT"]), Ranks.start()
    batch = load_rollouts(out / "batch.safetensors")
    for name in [*ALGORITHMS, "kept"]:
        grads, parameters = one_step(os.environ["KENPO_MODEL"], name, batch, budget=72, ranks=ranks)
        if ranks.first:
            save_file({"grads": grads, "parameters": parameters}, out / f"{name}.safetensors")
    ranks.close()


if __name__ == "__main__":
    _rank()
