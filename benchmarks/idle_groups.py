"""The update of a batch where groups alike in outcome run no backward pass, against one where all run it.

    python benchmarks/idle_groups.py            # a quarter, a half and three quarters of the groups; half a minute
    python benchmarks/idle_groups.py --quick    # two rounds of few groups, to see that it runs

The bundled model, 16 groups of 8 responses of 24 random tokens, GRPO without KL; both sides are `Updater.update`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import measure

SHARES = (0.25, 0.5, 0.75)


def batch(groups: int, size: int, share: float) -> Any:
    """Random rollouts; in `share` of the groups every outcome is 1, in the others every second one."""
    import torch

    from kenpo.types import Rollouts

    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 17, (groups, 8), generator=draw).repeat_interleave(size, 0)
    tokens = torch.cat([prompts, torch.randint(3, 17, (groups * size, 24), generator=draw)], 1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, 8:] = True
    row = torch.arange(groups * size)
    alike = row // size < round(share * groups)
    return Rollouts(
        mask=mask, group=row // size, rewards=torch.where(alike, 1.0, row % 2.0), tokens=tokens,
        logp_sampler=torch.full(tokens.shape, -2.8),
    )  # fmt: skip


def sides(rollouts: Any) -> dict[str, Callable[[], Any]]:
    """One update with idle groups left out of the backward pass, and one with none taken to be idle."""
    import kenpo
    from kenpo.learner import learner
    from kenpo.learner.idle import idle_rows
    from kenpo.models.loading import BUNDLED, load_model
    from kenpo.models.scorer import Scorer
    from kenpo.trainer.config import TrainConfig, resolve
    from kenpo.trainer.plan import plan_passes
    from kenpo.trainer.setup import learner_options
    from kenpo.trainer.update import Updater

    algorithm = kenpo.get("grpo").but(regularizers=())
    config = resolve(TrainConfig(model="bundled", lr=1e-6))
    model, _ = load_model(str(BUNDLED))
    passes = plan_passes(algorithm, config, 17)
    made = learner.Learner(Scorer(model), learner_options(config, passes))
    updater = Updater(made, algorithm, config, passes)

    def run(rule: Callable[..., Any]) -> None:
        learner.idle_rows = rule  # type: ignore[attr-defined]
        updater.update(rollouts, None, 1)

    return {"idle": lambda: run(idle_rows), "all": lambda: run(lambda a, b: b.prepared.selected & False)}


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--threads", type=int, default=0)
    a = p.parse_args()
    import torch

    if a.threads:
        torch.set_num_threads(a.threads)
    repeats, groups = (2, 4) if a.quick else (a.repeats, 16)
    found = {share: measure.interleaved(sides(batch(groups, 8, share)), repeats, warmup=2) for share in SHARES}
    ratios = {f"update_idle_{share:.0%}".rstrip("%"): measure.ratio(s["idle"], s["all"]) for share, s in found.items()}
    if not a.json:
        rows = [
            [f"{share:.0%}", *(f"{statistics.median(s[n]):.3f}" for n in ("idle", "all")), f"{r:.2f}"]
            for (share, s), r in zip(found.items(), ratios.values(), strict=True)
        ]
        print(measure.table(rows, ["groups alike", "left out, s", "backward for all, s", "ratio"]))
    measure.finish("idle_groups", ratios, measure.versions(), a.json, seconds={str(k): v for k, v in found.items()})


if __name__ == "__main__":
    main()
