"""Rows of a corpus beside another source's batches: no reward, no group, read by the likelihood of supervised rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenpo.batches import concatenate
from kenpo.errors import InputError
from kenpo.experience.demonstrations import Texts, encode
from kenpo.experience.episode import Episode, Row, build_rollouts
from kenpo.experience.source import Collected, Priorities, Score, Source, State, Usable
from kenpo.types import ROLLOUT_FIELDS, SUPERVISED, Rollouts


def reads_corpus(algorithm: Any) -> bool:
    """Whether a term of the loss is the likelihood of supervised rows (``origin`` 4)."""
    return any(r.supervised for r in algorithm.regularizers)


def reads_authors(algorithm: Any) -> bool:
    """Whether a stage asks who wrote a response that has a reward, an expert or the policy."""
    return any("origin" in s.needs and not getattr(s, "supervised", False) for s in algorithm.stages)


def check_corpus(algorithm: Any, corpus: str | None, rows: int | None, source: str | None = None) -> None:
    """InputError for a corpus that nothing reads, and for a stage that reads one where there is none."""
    reads = reads_corpus(algorithm)
    for option, given in (("--corpus", corpus), ("--corpus-rows", rows)):
        if given is not None and not reads:
            raise InputError(
                f"{option} {given}: no stage of {algorithm.name!r} reads rows without a reward; add one with "
                "--with supervised_nll, or leave it out"
            )
    if rows is not None and corpus is None:
        raise InputError(f"--corpus-rows {rows}: there is no corpus; name its file with --corpus")
    sampled = source in (None, "on_policy")
    if corpus is not None and not sampled:
        raise InputError(
            f"--corpus {corpus}: it stands beside samples of the policy, not beside {source}; leave it out"
        )
    if reads and corpus is None and sampled:
        raise InputError(
            f"algorithm {algorithm.name!r} reads rows of a corpus beside the samples; name a file of prompts and "
            "responses: --corpus FILE"
        )


class WithCorpus(Source):
    """`source` with ``rows`` texts beside each of its batches, in a group each, their rewards NaN, ``origin`` 4.

    The texts follow one another through the corpus, whatever the source draws; every text of a file is encoded when
    this is made, so that a bad row stops a run before its first step. What the rows have no number for (the sampler's
    log-probs, a baseline) is 0 or the field's padding. State: the source's own and the index of the next text.
    """

    def __init__(
        self, source: Source, texts: Texts, tokenizer: Any, context: int | None, rows: int, system: str | None = None
    ) -> None:
        self.source, self.texts, self.rows = source, texts, rows
        self.tokenizer, self.context, self.system = tokenizer, context, system
        self.headline, self.heldout = source.headline, source.heldout
        for text in texts.rows or [texts.text(i) for i in range(rows)]:
            encode(tokenizer, text, context, system)

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The source's batch of `step` with the next texts behind it."""
        state = state or {"source": None, "corpus": 0}
        made = self.source.next(step, state["source"], priorities, usable)
        numbers = range(state["corpus"], state["corpus"] + self.rows)
        batch = self._beside(made.rollouts, [self._episode(i) for i in numbers])
        tokens = int(batch.mask[batch.supervised].sum())
        figures = {**made.figures, "corpus/length": {"sum": tokens, "count": self.rows}}
        after = {"source": made.state, "corpus": numbers.stop}
        return Collected(batch, made.records, figures, after, made.generated, made.seconds)

    def measure(self, score: Score) -> dict[str, Any]:
        """The source's own held-out figures."""
        return self.source.measure(score)

    def _episode(self, index: int) -> Episode:
        return encode(self.tokenizer, self.texts.text(index), self.context, self.system)

    def _beside(self, sampled: Rollouts, episodes: list[Episode]) -> Rollouts:
        """The sampled rows, then the corpus's, with the same fields."""
        first = int(sampled.group.max()) + 1 if len(sampled) else 0
        rows = [Row(e, first + n, origin=SUPERVISED) for n, e in enumerate(episodes)]
        unknown = ("logp_sampler", "policy_version")
        given = build_rollouts(rows, also=("origin",), without=unknown, dtype=sampled.rewards.dtype)
        if sampled.origin is None:
            sampled = sampled.replace(origin=torch.zeros_like(sampled.group))
        mine = given.tensors()
        blank = {n: _padding(n, v, given) for n, v in sampled.tensors().items() if n not in mine}
        absent = sorted(mine.keys() - sampled.tensors().keys())
        return concatenate([sampled, given.replace(**blank, **dict.fromkeys(absent))])


def _padding(name: str, like: Tensor, rows: Rollouts) -> Tensor:
    """The field `name` of rows that have nothing to say in it, shaped as `like` is elsewhere."""
    spec = ROLLOUT_FIELDS[name]
    shape = [len(rows), *like.shape[1:]]
    if len(spec.axes) > 1 and spec.axes[1] == "T":
        shape[1] = rows.mask.shape[1]
    return like.new_full(shape, 0.0 if spec.kind == "float" else spec.pad)
