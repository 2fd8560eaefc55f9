"""An advantage that keeps a record of each prompt says how often each should be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kenpo
from kenpo import stages as S


@dataclass(frozen=True)
class Tracker(S.Advantage):
    """A running mean per prompt; prompts near one half are drawn more often."""

    _needs = frozenset({"prompt_id"})

    def __call__(self, rewards, ctx, state):
        kept = dict(state or {})
        for prompt in ctx.read("prompt_id").unique().tolist():
            mine = rewards[ctx.read("prompt_id") == prompt]
            kept[prompt] = 0.5 * kept.get(prompt, 0.5) + 0.5 * float(mine.mean())
        return ctx.per_token(rewards), kept

    def priorities(self, state):
        return {prompt: mean * (1 - mean) for prompt, mean in (state or {}).items()} or None


def test_priorities_follow_the_state():
    a = kenpo.get("rloo").but(name="tracked", advantage=Tracker())
    rollouts = kenpo.Rollouts(
        mask=torch.tensor([[False, True]] * 4),
        group=torch.tensor([0, 0, 1, 1]),
        prompt_id=torch.tensor([7, 7, 9, 9]),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
    )
    state = kenpo.prepare(a, rollouts).state
    assert a.advantage.priorities(None) is None
    assert a.advantage.priorities(state) == {7: 0.25, 9: 0.75 * 0.25}
    assert a.prepare_needs == {"prompt_id"}


def test_most_advantages_have_none():
    assert kenpo.get("grpo").advantage.priorities({"anything": 1}) is None


def test_what_prepare_reads_is_known_before_the_run():
    kl = kenpo.get("reinforce_pp").with_settings({"advantage.beta": 0.1})
    assert kl.prepare_needs == {"logp_old", "logp_ref"}
    assert kenpo.get("reinforce_pp").prepare_needs == frozenset()
    assert kenpo.get("zcpo").prepare_needs == frozenset()  # its advantage waits for the policy
    assert kenpo.feeds(kl, {"logp", "logp_ref"}) == "global_whiten reads 'logp_old', which is not supplied"
