"""Ranks with unequal work make equally many calls of the model, as a sharded one needs: each call is a collective."""

import os
import subprocess
import sys
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file

import kenpo
from kenpo.learner.cutting import cut
from kenpo.learner.learner import Learner, LearnerOptions
from kenpo.learner.optimizer import OptimizerOptions
from kenpo.models.passes import prompt_keys
from kenpo.models.scorer import Scorer
from kenpo.ranks import Ranks

D = torch.float64
BUDGET = 40
ALGORITHMS = ("gspo", "m2po", "conspo")  # one phase, two phases, whole groups


def rollouts(few=False):
    """Rows of very different lengths; `few`: a single group, so that a rank may have none of what is trained."""
    lengths = [50, 50] if few else [50, 2, 1, 1, 2, 1, 2, 1, 2, 1, 1, 2]
    size = 2 if few else 4
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.full((len(lengths), 56), -1), torch.zeros(len(lengths), 56, dtype=torch.bool)
    for r, n in enumerate(lengths):
        tokens[r, : 4 + n] = torch.randint(3, 64, (4 + n,), generator=g)
        mask[r, 4 : 4 + n] = True
    rewards = torch.tensor([float(r % 2) for r in range(len(lengths))], dtype=D)
    rewards[8:12] = 1.0  # a group without a gradient
    group = torch.arange(len(lengths)) // size
    return kenpo.Rollouts(tokens=tokens, mask=mask, group=group, rewards=rewards)


def gradients(ranks, counted):
    """By algorithm and batch; `counted` gets the model's calls of each."""
    found = {}
    for name in ALGORITHMS:
        for few in (False, True):
            model = tiny.gpt2(dtype=D)
            learner = Learner(Scorer(model), LearnerOptions(BUDGET, optimizer=OptimizerOptions(grad_clip=0.0)), ranks)
            calls = []

            def together(*_, calls=calls):
                calls.append(1)
                ranks.gather(0)  # stands for the exchange of a sharded layer: every rank has to come

            learner.scorer.module.register_forward_pre_hook(together)
            batch = rollouts(few).replace(logp_sampler=torch.full((2 if few else 12, 56), -3.0, dtype=D))
            algorithm = kenpo.get(name)
            learner.gradient(kenpo.prepare(algorithm, batch), algorithm).read(ranks)
            learner.terms(batch)
            counted.append(len(calls))
            found[f"{name}.{few}"] = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
            )
    return found


def test_the_work_is_unequal():
    """What the ranks have to do differs; how many microbatches they run does not."""
    batch, scorer = rollouts(), Scorer(tiny.gpt2(dtype=D))
    parts = cut(scorer, batch, range(12), prompt_keys(batch), BUDGET, 2)
    work = [sum(map(bool, part)) for part in parts]
    assert work[0] != work[1]
    assert len(parts[0]) == len(parts[1]) == max(work)
    assert sorted(r for part in parts for rows in part for r in rows) == list(range(12))


def test_two_ranks_with_unequal_work(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KENPO_OUT": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    both = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    calls = [found.pop("calls").tolist() for found in both]
    assert calls[0] == calls[1]
    alone = gradients(Ranks(), [])
    for name, right in alone.items():
        assert float(right.norm()) > 1e-6
        for found in both:
            assert float((found[name] - right).norm()) <= 1e-12 * float(right.norm()), name


def _rank() -> None:
    """What each process of the test runs."""
    torch.set_num_threads(1)
    ranks, counted = Ranks.start(), []
    found = gradients(ranks, counted)
    save_file(
        {**found, "calls": torch.tensor(counted)}, Path(os.environ["KENPO_OUT"]) / f"rank{ranks.rank}.safetensors"
    )
    ranks.close()


if __name__ == "__main__":
    _rank()
