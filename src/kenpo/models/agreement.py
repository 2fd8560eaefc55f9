"""How far a teacher and the policy agree on the policy's own tokens: a picture for the reader, never a gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kenpo.models.head import Head
from kenpo.models.passes import prompt_keys
from kenpo.models.scorer import Scorer
from kenpo.types import Rollouts

QUARTERS = 4
ROWS = 64
CHUNK = 512  # positions whose logits are held at once


@torch.no_grad()
def agreement(scorer: Scorer, rollouts: Rollouts) -> Mapping[str, tuple[float, float]]:
    """Sums and counts over the trainable tokens of the rows: ``teacher/agrees``, how often both find the same token
    likeliest; ``teacher/kl``, KL(policy‖teacher) over the vocabulary in nats at the sampling temperature; and the same
    by quarters of the response, ``teacher/kl/1`` … ``/4`` (a response of n tokens: token i stands in quarter ⌊4i/n⌋).

    Vocabularies of different sizes are compared over the entries that both have. Empty without a teacher or a trainable
    token. The teacher reads what it reads in training: the rows, or their hints.
    """
    keys = prompt_keys(rollouts)
    rows = scorer.rows(rollouts)
    if rows is None or scorer.teacher is None:
        return {}
    states = scorer.states(rows, keys)[0]
    teacher = scorer.taught(rollouts, rows, keys)
    agrees, kl = [], []
    for start in range(0, len(states), CHUNK):
        at = slice(start, start + CHUNK)
        p, q = (
            (x if x.dtype.itemsize > 2 else x.float()) / scorer.temperature
            for x in (_logits(states[at], scorer.head), _logits(teacher.states[at], teacher.head))
        )
        width = min(p.shape[-1], q.shape[-1])
        p, q = p[:, :width], q[:, :width]
        agrees.append((p.argmax(-1) == q.argmax(-1)).double())
        p, q = p.log_softmax(-1), q.to(p).log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1).double())
    found = {"teacher/agrees": torch.cat(agrees), "teacher/kl": torch.cat(kl)}
    quarter = torch.cat([torch.arange(n) * QUARTERS // n for n in rows.counts if n]).to(states.device)
    for number in range(QUARTERS):
        found[f"teacher/kl/{number + 1}"] = found["teacher/kl"][quarter == number]
    return {n: (float(v.sum()), float(len(v))) for n, v in found.items()}


def looked_at(rollouts: Rollouts, tokens: int) -> list[int]:
    """Rows to look at: up to ROWS of those that have a teacher, spread over the batch, within `tokens` padded ones."""
    have = rollouts.mask.any(-1) if rollouts.hinted is None else rollouts.mask.any(-1) & rollouts.hinted
    places = have.nonzero().squeeze(-1).tolist()
    most = min(ROWS, max(1, tokens // max(1, rollouts.mask.shape[1])), len(places))
    return [places[i * len(places) // most] for i in range(most)] if most else []


def _logits(states: torch.Tensor, head: Head | None) -> torch.Tensor:
    return states if head is None else head.logits(states)
