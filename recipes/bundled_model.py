"""How the bundled model was made. Run it again with

    python recipes/bundled_model.py --out runs/bundled

The shipped one took 13 minutes on two cores under heavy other load; expect two to three on idle ones. The same as

    kenpo sft --fresh qwen3 --steps 400 --lr 2e-3 --schedule cosine --threads 2 --out runs/bundled

A Qwen3-style model (1.63 M parameters) with random weights learns 3-digit addition from demonstrations of which 60 %
take every carry as 0. It ends up knowing two procedures: greedy decoding mostly drops the carry, sampling keeps it now
and then. That leaves reinforcement learning something to select.
"""

from __future__ import annotations

from kenpo.trainer.sft import SFTConfig, run


def bundled_model(out: str, seed: int = 0) -> SFTConfig:
    """The supervised run that makes the bundled model; sizes and numbers that are not named are the defaults."""
    return SFTConfig(
        out=out, fresh="qwen3", hidden=192, layers=4, heads=4, kv_heads=2, data="addition", dropped_carry=0.6,
        steps=400, batch=64, lr=2e-3, schedule="cosine", warmup=20, threads=2, seed=seed,
    )  # fmt: skip


if __name__ == "__main__":
    import tyro

    run(tyro.cli(bundled_model))
