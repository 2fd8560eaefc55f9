"""The last response to each prompt, kept until the prompt comes again: how far has the policy moved since?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kenpo.experience.source import Collected, Priorities, Score, Source, Start, State, Usable
from kenpo.types import Rollouts

_KEPT = ("tokens", "mask", "logp_sampler", "support_ids")


class Previous(Source):
    """`source` with ``drift`` [B] beside its rows: mean |log π_then − log π_now| over the prompt's previous response.

    What a prompt answered last is kept with its log-probs (log μ, as it was sampled) and scored again under the policy
    of the moment, before the batch is prepared: no update of this batch has a part in it. NaN: the prompt is new. A
    prompt that stands in a batch several times has one drift there, that of the response before the batch; its last
    response is what stays. State: the source's own, and the responses by prompt. Source: SPO, arXiv:2509.13232; which
    log-probs "then" are is our reading.
    """

    def __init__(self, source: Source, drift: Any) -> None:
        self.source, self.drift = source, drift
        self.headline, self.heldout, self.notes = source.headline, source.heldout, source.notes
        self.score: Score | None = None

    def begin(self, start: Start) -> None:
        """Takes the policy of the run."""
        self.score = start.score
        self.source.begin(start)

    def measure(self, score: Score) -> dict[str, Any]:
        """The source's own held-out figures."""
        return self.source.measure(score)

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The source's batch of `step` with the drift of its prompts."""
        state = state or {"source": None, "responses": {}}
        made = self.source.next(step, state["source"], priorities, usable)
        responses: dict[str, dict[str, Tensor]] = dict(state["responses"])
        batch = made.rollouts
        assert batch.prompt_id is not None
        names = [str(int(p)) for p in batch.prompt_id]
        known = [n for n in dict.fromkeys(names) if n in responses]
        found = dict(zip(known, self._moved([responses[n] for n in known]), strict=True))
        drift = torch.tensor([found.get(n, float("nan")) for n in names], dtype=batch.rewards.dtype)
        for row, name in enumerate(names):
            responses[name] = _kept(batch, row)
        values = [x for x in found.values() if x == x]
        figures = {**made.figures, "drift": {"sum": sum(values), "count": len(values)}}
        after = {"source": made.state, "responses": responses}
        return Collected(batch.replace(drift=drift), made.records, figures, after, made.generated, made.seconds)

    def _moved(self, responses: list[dict[str, Tensor]]) -> list[float]:
        """The drift of each of these responses under the policy of the moment."""
        if not responses:
            return []
        assert self.score is not None
        rows = _together(responses)
        now = self.score(rows).logp
        assert now is not None
        assert rows.logp_sampler is not None
        moved: Tensor = self.drift(rows.logp_sampler, now.to(rows.logp_sampler), rows.mask)
        return moved.tolist()


def _kept(batch: Rollouts, row: int) -> dict[str, Tensor]:
    """A row's own part of the batch, without the padding behind it."""
    assert batch.tokens is not None
    end = int((batch.tokens[row] >= 0).sum())
    fields = {name: getattr(batch, name) for name in _KEPT}
    return {name: value[row, :end].clone() for name, value in fields.items() if value is not None}


def _together(responses: list[dict[str, Tensor]]) -> Rollouts:
    """Kept rows as a batch of their own, padded on the right."""
    pads = {"tokens": -1, "mask": 0, "logp_sampler": 0.0, "support_ids": -1}

    def padded(name: str) -> Tensor:
        parts = [r[name] for r in responses]
        if parts[0].dim() == 2:  # ids that sampling kept, their number differs
            width = max(p.shape[1] for p in parts)
            parts = [pad(p, (0, width - p.shape[1]), value=-1) for p in parts]
        return pad_sequence(parts, batch_first=True, padding_value=pads[name])

    fields: dict[str, Any] = {name: padded(name) for name in responses[0]}
    size = len(responses)
    return Rollouts(group=torch.arange(size), rewards=torch.zeros(size), **fields)
