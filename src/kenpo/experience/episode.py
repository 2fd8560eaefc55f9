"""What was sampled, as rows for the objective: the one place where `Rollouts` are built."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from kenpo.engines.base import Completion
from kenpo.experience.problem import Problem
from kenpo.experience.verdict import Verdict
from kenpo.types import Rollouts


def answer_id(answer: str | None) -> int:
    """The identity of an extracted answer as `Rollouts.answer` holds it; -1 for none."""
    if answer is None:
        return -1
    return int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=8).digest(), "big") >> 1


def build_rollouts(
    problems: Sequence[Problem],
    prompts: Sequence[list[int]],
    completions: Sequence[Sequence[Completion]],
    verdicts: Sequence[Sequence[Verdict]],
    *,
    first_group: int = 0,
    with_support: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Rollouts:
    """`Rollouts` with the prompt and then the sampled tokens in each row, padded with -1 on the right.

    The mask covers exactly what was sampled, the end-of-sequence token included; a truncated response gets none. Group
    numbers count up from `first_group`, one per problem. A sample without verdict has reward NaN.
    """
    flat = [(p, c, v) for p in range(len(problems)) for c, v in zip(completions[p], verdicts[p], strict=True)]
    width = max((len(prompts[p]) + len(c.tokens) for p, c, _ in flat), default=0)
    shape = (len(flat), width)
    tokens = torch.full(shape, -1, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    logp = torch.zeros(shape, dtype=dtype)
    version = torch.full(shape, -1, dtype=torch.int32)
    widest = max((len(s) for _, c, _ in flat for s in c.support or ()), default=1) if with_support else 0
    support = torch.full((*shape, widest), -1, dtype=torch.int64) if with_support else None
    for row, (p, c, _) in enumerate(flat):
        start, end = len(prompts[p]), len(prompts[p]) + len(c.tokens)
        tokens[row, :end] = torch.tensor([*prompts[p], *c.tokens], dtype=torch.int64)
        mask[row, start:end] = True
        logp[row, start:end] = torch.tensor(c.logp, dtype=dtype)
        version[row, start:end] = c.version
        if support is not None:
            for t, ids in enumerate(c.support or ()):
                support[row, start + t, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    parts = {n: torch.full((len(flat),), math.nan, dtype=dtype) for _, _, v in flat for n in v.parts}
    for row, (_, _, v) in enumerate(flat):
        for name, value in v.parts.items():
            parts[name][row] = value
    return Rollouts(
        mask=mask,
        group=torch.tensor([first_group + p for p, _, _ in flat], dtype=torch.int64),
        rewards=torch.tensor([v.reward for _, _, v in flat], dtype=dtype),
        tokens=tokens,
        prompt_id=torch.tensor([problems[p].id for p, _, _ in flat], dtype=torch.int64),
        answer=torch.tensor([answer_id(v.answer) for _, _, v in flat], dtype=torch.int64),
        logp_sampler=logp,
        support_ids=support,
        policy_version=version,
        truncated=torch.tensor([c.truncated for _, c, _ in flat], dtype=torch.bool),
        reward_parts=parts,
    )
