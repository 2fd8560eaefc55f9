"""How a model like the bundled one is made. Run

    python recipes/bundled_model.py --out runs/bundled

A Qwen3-style model (1.63 M parameters) with random weights learns 3-digit addition from demonstrations of which 60 %
take every carry as 0. It ends up knowing two procedures: greedy decoding mostly drops the carry, sampling keeps it now
and then. That leaves reinforcement learning something to select.

The shipped weights were made with these numbers by an earlier supervised trainer, which added in another order: this
run makes a model of the same kind, not the same bits. It is the same as

    python recipes/fresh_model.py --out runs/fresh
    kenpo sft --model runs/fresh --steps 400 --lr 2e-3 --schedule cosine --threads 2 --out runs/bundled
"""

from __future__ import annotations

from typing import Any

from fresh_model import Architecture, write

from kenpo import TrainConfig, train

SHAPE = Architecture("qwen3", hidden=192, layers=4, heads=4, kv_heads=2)


def bundled_model(out: str, start: str, seed: int = 0) -> TrainConfig:
    """The supervised run from the fresh model in `start`; numbers that are not named are the defaults."""
    return TrainConfig(
        algorithm="sft", out=out, model=start, task="addition", dropped_carry=0.6, steps=400, prompts=64, lr=2e-3,
        schedule="cosine", warmup=20, threads=2, seed=seed,
    )  # fmt: skip


def main(out: str, seed: int = 0) -> dict[str, Any]:
    """Write the fresh model beside `out`, then train it; the model is out/checkpoints/step_000400."""
    from kenpo.runs.progress import make_progress

    start = f"{out}-fresh"
    write(SHAPE, start, seed)
    return train(bundled_model(out, start, seed), make_progress(False))


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
