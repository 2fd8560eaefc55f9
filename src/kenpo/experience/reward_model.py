"""A trained reward model as a verifier: the score of its head is the reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kenpo.episode import Episode, Segment
from kenpo.errors import InputError
from kenpo.experience.demonstrations import Text, encode
from kenpo.experience.episode import Row, build_rollouts
from kenpo.experience.verdict import Base, Sample, Verdict, abstain
from kenpo.models.loading import context_length, load_model
from kenpo.models.scorer import Scorer
from kenpo.models.value_head import load_heads

PREFIX = "model:"
SCORE = frozenset({"score"})


class RewardModel(Base):
    """``model:PATH``, the folder of a checkpoint of `--algorithm reward_model`; it scores on a scorer of its own.

    The samples of one problem run together, and never with those of another: what a sample earns depends on its group
    alone, so that a resumed run repeats. Prompt and response are written as in training on pairs, the end included
    unless the response was cut off. One that does not fit the model's context, or its vocabulary, gets no verdict.
    `InputError` for a folder without a head for scores.
    """

    def __init__(self, spec: str) -> None:
        self.name = spec
        folder = Path(spec.removeprefix(PREFIX)).expanduser()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model, self.tokenizer = load_model(str(folder), dtype="float32", device=device, trainable=False)
        heads = load_heads(self.model, folder)
        if heads is None or "score" not in heads:
            raise InputError(
                f"verifier {spec}: holds no head for scores; name a checkpoint of kenpo train --algorithm reward_model"
            )
        self.scorer = Scorer(self.model, heads=heads.requires_grad_(False), scalars_only=True)
        self.context = context_length(self.model)

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in the order given."""
        groups: dict[Any, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(("alone", i) if sample.group is None else sample.group, []).append(i)
        found: dict[int, Verdict] = {}
        for places in groups.values():
            found |= dict(zip(places, self._group([samples[i] for i in places]), strict=True))
        return [found[i] for i in range(len(samples))]

    def _group(self, samples: Sequence[Sample]) -> list[Verdict]:
        verdicts: list[Verdict | None] = []
        rows: list[Row] = []
        for sample in samples:
            try:
                rows.append(Row(self._episode(sample), 0))
                verdicts.append(None)
            except InputError as error:
                verdicts.append(abstain(str(error)))
        scores = iter(self._scores(rows) if rows else [])
        return [v or Verdict(next(scores), "ok") for v in verdicts]

    def _episode(self, sample: Sample) -> Episode:
        prompt: Any = sample.prompt
        made = encode(self.tokenizer, Text(prompt, sample.completion, "this sample"), self.context)
        if not sample.truncated:
            return made
        ids = made.tokens[:-1]
        if not ids:
            raise InputError("this sample: cut off before its first token")
        return Episode((made.segments[0], Segment(ids, sampled=True)), finish="length", text=made.text)

    def _scores(self, rows: Sequence[Row]) -> list[float]:
        rollouts = build_rollouts(rows, without=("logp_sampler", "policy_version"))
        scores = self.scorer.terms(rollouts, SCORE).score
        assert scores is not None
        return [float(x) for x in scores]
