"""How varied the answers of a group are, where prompts have several valid ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kenpo.experience.episode import answer_id
from kenpo.experience.problem import Problem
from kenpo.experience.source import Collected, Priorities, Score, Source, Start, State, Usable
from kenpo.experience.targets import targets_of
from kenpo.experience.tasks import Task
from kenpo.types import Rollouts


class Varied(Source):
    """`source` with figures of how varied its groups' answers are; its batches are untouched.

    Over groups with a valid answer among theirs: ``answers/distinct``, how many different ones; ``answers/divergence``,
    the Jensen-Shannon divergence (nats) of their shares to uniform over all valid ones. Over all: ``answers/valid``,
    the share of responses that gave one, and ``answers/variety``, 1 − self-BLEU of a group's responses.
    """

    def __init__(self, source: Source, task: Task) -> None:
        self.source, self.task = source, task
        self.headline, self.heldout, self.notes = source.headline, source.heldout, source.notes

    def begin(self, start: Start) -> None:
        """Nothing of its own."""
        self.source.begin(start)

    def measure(self, score: Score) -> dict[str, Any]:
        """The source's own held-out figures."""
        return self.source.measure(score)

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The source's batch of `step` with figures of its answers."""
        made = self.source.next(step, state, priorities, usable)
        assert made.rollouts.prompt_id is not None
        valid = {p: targets_of(self.task.problem(p))[0] for p in made.rollouts.prompt_id.unique().tolist()}
        figures = {**made.figures, **variety(made.rollouts, {p: [answer_id(v) for v in vs] for p, vs in valid.items()})}
        return Collected(made.rollouts, made.records, figures, made.state, made.generated, made.seconds)


def with_variety(source: Source, task: Task, problems: Sequence[Problem]) -> Source:
    """`source` with those figures if each of these problems has several valid answers; else itself."""
    return Varied(source, task) if all(len(targets_of(p)[0]) > 1 for p in problems) else source


def variety(rollouts: Rollouts, targets: Mapping[int, Sequence[int]]) -> dict[str, dict[str, float]]:
    """The figures as sums and counts; `targets` holds the identities of each prompt's valid answers."""
    assert rollouts.answer is not None
    assert rollouts.prompt_id is not None
    distinct, divergence, usable, texts = [], [], 0, []
    for g in torch.unique(rollouts.group).tolist():
        rows = (rollouts.group == g).nonzero().flatten().tolist()
        valid = targets[int(rollouts.prompt_id[rows[0]])]
        counts = Counter(a for a in rollouts.answer[rows].tolist() if a in set(valid))
        usable += counts.total()
        if counts:
            distinct.append(len(counts))
            divergence.append(from_uniform([counts.get(i, 0) for i in valid]))
        if len(rows) > 1 and rollouts.tokens is not None:
            texts.append(1 - self_bleu([_response(rollouts.tokens[r], rollouts.mask[r]) for r in rows]))
    return {
        "answers/distinct": {"sum": float(sum(distinct)), "count": len(distinct)},
        "answers/divergence": {"sum": math.fsum(divergence), "count": len(divergence)},
        "answers/valid": {"sum": float(usable), "count": len(rollouts)},
        "answers/variety": {"sum": math.fsum(texts), "count": len(texts)},
    }


def from_uniform(counts: Sequence[int]) -> float:
    """Jensen-Shannon divergence, in nats, of the shares of `counts` to uniform; 0 if alike, at most log 2.

    >>> round(from_uniform([2, 2]), 6), round(from_uniform([4, 0]), 6)
    (0.0, 0.215762)
    """
    total, even = sum(counts), 1 / len(counts)
    value = 0.0
    for count in counts:
        p = count / total
        m = (p + even) / 2
        value += (p * math.log(p / m) if p else 0.0) / 2 + even * math.log(even / m) / 2
    return value


def self_bleu(texts: Sequence[Sequence[int]], order: int = 4) -> float:
    """Mean over texts of the BLEU of each against all others: 1 where all are alike, 0 where nothing is shared.

    Texts are sequences of token ids; n-grams up to `order`, or up to the text's own length if that is shorter, weighed
    alike, without smoothing; the length penalty is by the closest length. An empty text has 1 if another is empty, else
    0. Source: Texygen, arXiv:1802.01886.

    >>> self_bleu([[1, 2, 3], [1, 2, 3]]), self_bleu([[1, 2], [3, 4]])
    (1.0, 0.0)
    """
    return math.fsum(_bleu(t, [o for j, o in enumerate(texts) if j != i], order) for i, t in enumerate(texts)) / len(
        texts
    )


def _bleu(text: Sequence[int], others: Sequence[Sequence[int]], order: int) -> float:
    if not text:
        return float(any(not o for o in others))
    total = 0.0
    orders = range(1, min(order, len(text)) + 1)
    for n in orders:
        own, most = _grams(text, n), Counter[tuple[int, ...]]()
        for other in others:
            most |= _grams(other, n)
        shared = (own & most).total()
        if not shared:
            return 0.0
        total += math.log(shared / own.total())
    closest = min((abs(len(o) - len(text)), len(o)) for o in others)[1]
    return math.exp(total / len(orders) + min(0.0, 1 - closest / len(text)))


def _grams(text: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))


def _response(tokens: Tensor, mask: Tensor) -> list[int]:
    return list(tokens[mask].tolist())
