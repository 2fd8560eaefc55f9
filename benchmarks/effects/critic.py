"""Critic or group: PPO's and VAPO's lambdas beside GRPO where a reward is rare and comes late.

    python benchmarks/effects/critic.py            # five seeds; goes on with what its file lacks
    python benchmarks/effects/critic.py --quick

Planted: sums in which all three places carry, which the bundled model gets right in 0.37 of its samples, and a reward
that only every fourth of them can earn (those whose sum four divides), at the end of about 29 tokens: under a tenth of
the samples earn it. Held out are problems that can earn it. All runs generate equally many samples; those on which a
critic learns alone at first count. Three runs:

- `grpo`: the mean of a group of 8 as the baseline, no critic;
- `ppo`: a critic with a model of its own (a copy of the starting policy), λ .95;
- `vapo`: λ 1 for the critic, max(0, 1 − 1/(.05 n)) for the policy (.31 at 29 tokens), likelihood of right answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import runs as effect

from kenpo.experience.addition import is_held_out

COMMON = [
    "--prompts", "16", "--group-size", "8", "--max-tokens", "40", "--lr", "5e-5", "--warmup", "4",
    "--betas", "0.9", "0.99", "--minibatches", "4", "--eval-problems", "200", "--checkpoint-every", "0",
    "--verifier-workers", "1",
]  # fmt: skip
APART = ["--critic", "bundled", "--critic-lr", "1e-3", "--critic-warmup"]
FIGURES = ("reward", "explained_variance", "value_loss")


REWARD = '''"""A reward that every fourth problem can earn."""


def rare(completion, answer):
    right = completion.rsplit("#", 1)[-1].strip() == str(answer)
    return float(right and int(answer) % 4 == 0)
'''


def write(home: Path) -> None:
    """The reward, 3,000 sums of two 3-digit numbers in which every place carries, and 200 that are held out and pay."""
    train, held = [], []
    for a in range(199, 1000):
        for b in range(199, 1000, 3):
            if all(x + y >= 10 for x, y in zip(map(int, str(a)), map(int, str(b)), strict=True)):
                row = {"prompt": f"{a}+{b}=", "answer": str(a + b)}
                if not is_held_out(a, b):
                    train.append(row)
                elif (a + b) % 4 == 0:
                    held.append(row)
    for name, rows, most in (("train", train, 3000), ("held", held, 200)):
        spread = rows[:: max(1, len(rows) // most)][:most]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spread))
    (home / "reward.py").write_text(REWARD)


def variants(quick: bool) -> dict[str, list[str]]:
    """The runs by name."""
    alone = [*APART, "1" if quick else "3"]
    return {
        "grpo": ["--algorithm", "grpo", "--set", "regularizers=[]"],
        "ppo": ["--algorithm", "ppo", *alone, "--set", "advantage.kl=0.0"],
        "vapo": ["--algorithm", "vapo", *alone],
    }


def main() -> None:
    a = effect.arguments(__doc__ or "")
    home = effect.models("critic", a.quick)
    write(effect.ROOT / home)
    files = [
        "--task",
        f"{home}/train.jsonl",
        "--eval-file",
        f"{home}/held.jsonl",
        "--verifier",
        f"{home}/reward.py:rare",
    ]
    length = ["--steps", "3" if a.quick else "16", "--eval-every", "0" if a.quick else "4"]
    cells = [
        effect.Cell(name, seed, (*COMMON, *files, *length, *options))
        for seed in range(1 if a.quick else a.seeds)
        for name, options in variants(a.quick).items()
    ]
    found = effect.measured("critic", cells, a, FIGURES)
    extra = {name: explained(found, name) for name in variants(a.quick)}
    effect.finish("critic", found, a, effect.table(found, extra))


def explained(found: dict, name: str) -> str:
    """Explained variance over the second half of a run, the mean over its seeds."""
    curves = [r["figures"]["explained_variance"] for key, r in found.items() if key.rpartition("/")[0] == name]
    late = [x for curve in curves for x in curve[len(curve) // 2 :] if x is not None]
    return f"explained variance {sum(late) / len(late):.2f}" if late else ""


if __name__ == "__main__":
    main()
