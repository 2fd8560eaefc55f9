"""`missing_old_logits`: the log-probs of an average of the weights, scored before each batch's updates."""

import pytest
import torch
from safetensors.torch import load_file

from kenpo.models.loading import load_model
from kenpo.models.scorer import Scorer
from kenpo.runs.checkpoint import found
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.loop import train
from kenpo.types import Rollouts

from .test_resume import same_end, stop_after


@pytest.fixture
def averaging(options):
    return options | {
        "algorithm": "missing_old_logits", "settings": {}, "lag": 2, "lr": 1e-2, "eval_problems": 0, "keep": 0,
        "checkpoint_every": 1,
    }  # fmt: skip


@pytest.mark.parametrize("decay", [0.5, 0.0])
def test_the_proximal_policy_is_the_average_of_the_weights(decay, averaging, tmp_path):
    """The average is made again from the checkpoints, number by number."""
    train(TrainConfig(**averaging, prox_decay=decay, out=str(tmp_path / "run")))
    model, _ = load_model(averaging["model"], device="cpu", dtype="float32")
    own, moved = dict(model.named_parameters()), 0.0
    folders = found(tmp_path / "run" / "checkpoints")
    for step, file in enumerate(sorted((tmp_path / "run" / "batches").iterdir())):
        batch = load_file(file)
        rows = Rollouts(**{n: batch[n] for n in ("mask", "group", "rewards", "tokens")})
        logp, mask = Scorer(model).terms(rows).logp, batch["mask"]
        assert (logp - batch["logp_prox"])[mask].abs().max() < 1e-5
        moved = max(moved, float((batch["logp_sampler"] - batch["logp_prox"])[mask].abs().max()))
        newest = load_file(folders[step] / "model.safetensors")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(decay * p + (1 - decay) * newest[name])
    assert moved > 1e-3


def test_it_goes_on_bit_for_bit(averaging, tmp_path):
    train(TrainConfig(**averaging, out=str(tmp_path / "a")))

    def fall():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(TrainConfig(**averaging, out=str(tmp_path / "b")), stop_after(3, fall))
    train(TrainConfig(**averaging, out=str(tmp_path / "b"), resume=True))
    same_end(tmp_path / "b", tmp_path / "a")
