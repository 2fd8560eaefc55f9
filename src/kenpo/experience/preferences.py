"""Pairs as rollouts: groups of two, of which the chosen response has the reward 1 and the rejected one 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kenpo.episode import Episode
from kenpo.errors import InputError
from kenpo.experience.demonstrations import Text, encode
from kenpo.experience.episode import Row, build_rollouts
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.pairs import Pair, PairStream
from kenpo.experience.reference import ReferenceLogProbs
from kenpo.experience.source import Collected, Priorities, Score, Source, Start, State, Usable
from kenpo.types import Policy, Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sums = Mapping[str, tuple[float, float]]
#: What the algorithm says of pairs under a policy: sums and counts of figures. The trainer hands it over, so that a
#: source knows no loss.
Figures = Callable[[Rollouts, Policy], Sums]
Both = tuple[Episode, Episode]


@dataclass(frozen=True)
class PairOptions:
    """``batch`` pairs per step; ``reach`` pairs of the stream that the run will read; ``measured`` held-out pairs
    scored at once; ``system`` prompt of a chat template. ``terms`` are the Policy fields that figures are made of.
    ``reference``: which pairs need log-probs of the starting policy, "all", "heldout" or "none". ``margin``: every pair
    must say by how much it is better. ``numbers`` says how log-probs are computed (precision, temperature)."""

    batch: int = 32
    reach: int = 32
    measured: int = 128
    system: str | None = None
    terms: frozenset[str] = frozenset({"logp"})
    reference: str = "none"
    margin: bool = False
    numbers: str = ""
    dtype: torch.dtype = torch.float32


class Pairs(Source):
    """Batches of pairs, prompts masked, both responses with their end; chosen and rejected rows stand side by side.

    Its state is ``{"cursor": n}``: the index of the next unused pair. Held out it measures what the algorithm says of
    pairs (loss, accuracy, margin, rewards, distance to the start), and with an `evaluator` the greedy accuracy on a
    task's problems. Log-probs of the starting policy are computed once, by `begin`, and kept in the run's folder. Every
    pair is encoded when the source is made, so that a bad row stops a run before its first step.
    """

    headline = "eval/pair_accuracy"

    def __init__(
        self, stream: PairStream, tokenizer: PreTrainedTokenizerBase, context: int | None, options: PairOptions,
        figures: Figures, evaluator: Evaluator | None = None,
    ) -> None:  # fmt: skip
        if tokenizer.eos_token_id is None:
            raise InputError("tokenizer: has no end-of-sequence token, so no response could ever end; add one to it")
        self.stream, self.tokenizer, self.context, self.options = stream, tokenizer, context, options
        self.figures, self.evaluator = figures, evaluator
        if options.margin:
            _check_margins([*stream.rows, *stream.heldout])
        self._rows = [self._encode(pair) for pair in stream.rows]
        self._held = [self._encode(pair) for pair in stream.heldout]
        self.heldout = len(self._held) + (len(evaluator.problems) if evaluator else 0)
        if not self._held and evaluator:
            self.headline = "eval/accuracy"
        self._reference: ReferenceLogProbs | None = None

    def begin(self, start: Start) -> None:
        """The starting policy's log-probs: computed under `score` and written, or read and checked where the run goes
        on. `InputError` if they belong to other rows, weights, template or numbers."""
        if self.options.reference == "none":
            return
        places = sorted({self.stream.place(i) for i in range(self.options.reach)})
        wanted = [self._rows[p] for p in places] if self.options.reference == "all" else []
        rows = [e for both in [*wanted, *self._held] for e in both]
        self._reference = ReferenceLogProbs(
            rows, {**start.stands_on, "numbers": self.options.numbers}, self.options.dtype
        )
        self._reference.obtain(lambda some: self._score(some, start.score), start, 2 * self.options.measured)

    def _score(self, episodes: Sequence[Episode], score: Score) -> torch.Tensor:
        rows = [Row(e, n) for n, e in enumerate(episodes)]
        rollouts = build_rollouts(rows, without=("logp_sampler", "policy_version"), dtype=self.options.dtype)
        logp = score(rollouts).logp
        assert logp is not None
        return logp.cpu()[rollouts.mask]

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The next ``batch`` pairs of the stream. Refuses priorities and selection: there is nothing to choose from."""
        if priorities is not None or usable is not None:
            raise InputError("pairs are read in order; an algorithm that selects or prioritises needs samples")
        cursor = int((state or {}).get("cursor", 0))
        places = [self.stream.place(i) for i in range(cursor, cursor + self.options.batch)]
        pairs, both = [self.stream.rows[p] for p in places], [self._rows[p] for p in places]
        rollouts = self._rollouts(pairs, both, places, self.options.reference == "all")
        lengths = rollouts.mask.sum(1)
        figures = {
            "length_chosen": {"sum": int(lengths[0::2].sum()), "count": len(places)},
            "length_rejected": {"sum": int(lengths[1::2].sum()), "count": len(places)},
        }
        return Collected(rollouts, figures=figures, state={"cursor": cursor + self.options.batch})

    def measure(self, score: Score) -> dict[str, Any]:
        """Figures of the held-out pairs and, with a task, its accuracy."""
        found = self.evaluator.run()[0].metrics() if self.evaluator else {}
        sums: dict[str, list[float]] = {}
        for start in range(0, len(self._held), self.options.measured):
            part = slice(start, start + self.options.measured)
            both = self._held[part]
            rollouts = self._rollouts(
                self.stream.heldout[part], both, range(start, start + len(both)), self.options.reference != "none"
            )
            for name, (total, count) in self.figures(rollouts, score(rollouts, self.options.terms)).items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return {**found, **{f"eval/{n}": {"sum": s, "count": c} for n, (s, c) in sums.items()}}

    def _encode(self, pair: Pair) -> Both:
        sides = (Text(pair.prompt, text, pair.where) for text in (pair.chosen, pair.rejected))
        chosen, rejected = (encode(self.tokenizer, t, self.context, self.options.system) for t in sides)
        return chosen, rejected

    def _rollouts(
        self, pairs: Sequence[Pair], encoded: Sequence[Both], ids: Sequence[int], reference: bool
    ) -> Rollouts:
        numbers: list[dict[str, float]] = [{} if p.margin is None else {"margin": p.margin} for p in pairs]
        rows = [
            Row(episode, group, reward=1.0 - side, prompt_id=ids[group], numbers=numbers[group])
            for group, both in enumerate(encoded)
            for side, episode in enumerate(both)
        ]
        also = ["turn", *(["margin"] if self.options.margin else [])]
        made = build_rollouts(rows, also=also, without=("logp_sampler", "policy_version"), dtype=self.options.dtype)
        if not reference:
            return made
        assert self._reference is not None
        return made.replace(logp_ref=self._reference.of([e for both in encoded for e in both], made.mask))


def _check_margins(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        if pair.margin is None:
            raise InputError(f"{pair.where}: no margin (column 'margin'), which the algorithm takes off; give it one")
