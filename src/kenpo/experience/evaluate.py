"""Held-out accuracy of a model: greedy, or of several samples per problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenpo.engines.base import Engine, Request, SamplingOptions
from kenpo.episode import Episode
from kenpo.errors import VerifierError
from kenpo.experience.estimates import pass_at_k
from kenpo.experience.judge import Judge, all_stop, describe, sample_groups
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.verdict import Verifier
from kenpo.ranks import Ranks
from kenpo.seeds import stable_seed


@dataclass(frozen=True)
class Outcome:
    """What an evaluation found. Samples without verdict are left out of every denominator and counted."""

    problems: int
    correct: int  # samples
    judged: int  # samples with a verdict
    reward: float  # sum over judged samples
    no_verdict: int
    truncated: int
    tokens: int
    per_problem: list[tuple[int, int]]  # (judged, correct) of each problem

    @property
    def accuracy(self) -> float:
        """Correct share of the judged samples; NaN if none was judged."""
        return self.correct / self.judged if self.judged else math.nan

    def pass_at(self, k: int) -> tuple[float, int]:
        """(sum of pass@k over problems with at least k judged samples, number of such problems)."""
        values = [pass_at_k(n, c, k) for n, c in self.per_problem if n >= k]
        return sum(values), len(values)

    def metrics(self) -> dict[str, Any]:
        """Figures for ``metrics.jsonl``."""
        n = self.judged + self.no_verdict
        return {
            "eval/accuracy": {"sum": self.correct, "count": self.judged},
            "eval/reward": {"sum": self.reward, "count": self.judged},
            "eval/length": {"sum": self.tokens, "count": n},
            "eval/truncated": {"sum": self.truncated, "count": n},
            "eval/no_verdict": {"sum": self.no_verdict, "count": n},
        }


class Evaluator:
    """Evaluates the engine's current weights on fixed held-out problems."""

    def __init__(
        self, problems: Sequence[Problem], engine: Engine, prompts: Prompts, verifier: Verifier, ranks: Ranks,
        options: SamplingOptions, *, correct_at: float = 1.0, batch: int = 256,
    ) -> None:  # fmt: skip
        self.problems, self.engine, self.prompts, self.verifier = list(problems), engine, prompts, verifier
        self.ranks, self.options, self.correct_at, self.batch = ranks, options, correct_at, batch

    def run(self, *, samples: int = 1, greedy: bool = True, seed: int = 0) -> tuple[Outcome, list[dict[str, Any]]]:
        """(outcome, one record per sample), the same on every rank. VerifierError if no sample has a verdict.

        Problem i's sample j depends on `seed`, i and j alone, not on the batch size or the number of ranks.
        """
        records: list[dict[str, Any]] = []
        mine = self.ranks.share(len(self.problems))
        options = self.options if not greedy else replace(self.options, temperature=1.0, top_p=1.0, top_k=0)
        with all_stop(self.ranks), Judge(self.verifier) as judge:  # judges a batch while the next one is sampled
            sampled: dict[int, list[Episode]] = {}
            for start in range(mine.start, mine.stop, self.batch):
                asked = {}
                for i in range(start, min(start + self.batch, mine.stop)):
                    prompt = tuple(self.prompts.encode(self.problems[i]))
                    requests = [Request(prompt, stable_seed(seed, i, j), options, greedy) for j in range(samples)]
                    asked[i] = (self.problems[i], requests)
                sampled |= sample_groups(self.engine, judge, asked)
            for i, verdicts in sorted(judge.verdicts().items()):
                judged = enumerate(zip(sampled[i], verdicts, strict=True))
                records += [{"index": i, **describe(self.problems[i], j, e, v)} for j, (e, v) in judged]
        records = self.ranks.gather_list(records)
        outcome = self._outcome(records)
        if records and not outcome.judged:
            first = records[0]
            raise VerifierError(
                f"verifier {self.verifier.name!r} gave no verdict on any of the {len(records)} held-out samples; "
                f"the first: {first['status']}{': ' + first['detail'] if first['detail'] else ''}"
            )
        return outcome, records

    def measure(self) -> dict[str, Any]:
        """Greedy figures of all problems together and, where they belong to sets with names, of each set."""
        sets = list(dict.fromkeys(problem.set for problem in self.problems))
        if len(sets) < 2:
            return self.run()[0].metrics()
        alone = {name: self.of([p for p in self.problems if p.set == name]).run()[0].metrics() for name in sets}
        whole = {
            figure: {part: sum(found[figure][part] for found in alone.values()) for part in ("sum", "count")}
            for figure in alone[sets[0]]
        }
        named = {
            f"eval/{s}/{f.removeprefix('eval/')}": value for s, found in alone.items() for f, value in found.items()
        }
        return whole | named

    def of(self, problems: Sequence[Problem]) -> Evaluator:
        """The same for other problems."""
        return Evaluator(
            problems, self.engine, self.prompts, self.verifier, self.ranks, self.options,
            correct_at=self.correct_at, batch=self.batch,
        )  # fmt: skip

    def _outcome(self, records: list[dict[str, Any]]) -> Outcome:
        judged = [r for r in records if r["reward"] is not None]
        counts = {i: [0, 0] for i in range(len(self.problems))}
        for r in judged:
            counts[r["index"]][0] += 1
            counts[r["index"]][1] += r["reward"] >= self.correct_at
        return Outcome(
            problems=len(self.problems),
            correct=sum(c for _, c in counts.values()),
            judged=len(judged),
            reward=math.fsum(r["reward"] for r in judged),
            no_verdict=len(records) - len(judged),
            truncated=sum(r["truncated"] for r in records),
            tokens=sum(r["tokens"] for r in records),
            per_problem=[(n, c) for n, c in counts.values()],
        )
