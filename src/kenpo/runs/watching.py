"""What a run says while it goes on: batches whose rewards teach nothing."""

from __future__ import annotations

from typing import Any

from kenpo.types import Rollouts


class Watch:
    """Says of batches whose rewards are all alike that nothing is learnt: of the first one at once, of later ones after
    three in a row, each once in a process. ``algorithm``: one that judges by rewards, else nothing is said."""

    def __init__(self, algorithm: Any) -> None:
        self.judges = bool(algorithm.advantage.judges)
        self.row, self.told = 0, False

    def __call__(self, rollouts: Rollouts, step: int) -> list[str]:
        """What to say after this batch."""
        said = alike(rollouts) if self.judges else None
        self.row = self.row + 1 if said else 0
        if said is None or self.told or (step > 1 and self.row < 3):
            return []
        self.told = step > 1
        return [said if step == 1 else f"in {self.row} batches in a row, {said}"]


def alike(rollouts: Rollouts) -> str | None:
    """What to say of a batch whose rewards are all equal (rollouts without a verdict aside), or None."""
    rewards = rollouts.rewards[rollouts.rewards.isfinite()]
    if len(rewards) < 2 or bool((rewards != rewards[0]).any()):
        return None
    cut = int(rollouts.truncated.sum()) if rollouts.truncated is not None else 0
    return (
        f"all {len(rewards)} rewards are {float(rewards[0]):g}: nothing tells good responses from bad, so nothing "
        "is learnt. Commonest causes: the model never (or always) earns the reward on these prompts (easier prompts, a "
        f"larger --group-size); responses are cut off before they answer ({cut} of {len(rollouts.rewards)} here; raise "
        "--max-tokens); the verifier does not read this form of answer (look into samples.jsonl)"
    )
