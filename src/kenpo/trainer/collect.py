"""One rollout batch: problems become prompts, the engine samples, the verifier judges, dynamic sampling asks for more.

Every sample's seed is a hash of the run's seed, the step, the round, the problem's index and the sample's number, so a
resumed run, or one with more ranks, draws the same samples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

import kenpo
from kenpo.batches import concatenate
from kenpo.engines.base import Completion, Engine, SamplingOptions
from kenpo.errors import RefillExhaustedError, RunError, VerifierError
from kenpo.experience.episode import build_rollouts
from kenpo.experience.judge import Judge, all_stop, describe
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.tasks import Task
from kenpo.experience.verdict import Verdict, Verifier
from kenpo.ranks import Ranks
from kenpo.seeds import stable_seed
from kenpo.trainer.config import TrainConfig
from kenpo.types import Rollouts


@dataclass(frozen=True)
class Collected:
    """A filled batch, the same on every rank. ``records`` describe every sample that was drawn, kept or not."""

    rollouts: Rollouts
    records: list[dict[str, Any]]
    cursor: int  # index of the next unused problem
    rounds: int
    groups_drawn: int
    seconds: dict[str, float]

    @property
    def generated(self) -> int:
        """Tokens sampled in all rounds."""
        return sum(r["tokens"] for r in self.records)


class Collector:
    """Fills rollout batches for one run."""

    def __init__(
        self,
        config: TrainConfig,
        algorithm: Any,
        task: Task,
        verifier: Verifier,
        engine: Engine,
        prompts: Prompts,
        ranks: Ranks,
    ) -> None:
        self.config, self.algorithm, self.task, self.verifier = config, algorithm, task, verifier
        self.engine, self.prompts, self.ranks = engine, prompts, ranks
        self.options = sampling_options(config)
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32

    def collect(self, step: int, cursor: int) -> Collected:
        """The batch of `step`, from the problem stream at `cursor` on.

        Raises `VerifierError` if the run's first round has no verdict at all, `RunError` if a later one has none, and
        `RefillExhaustedError` if dynamic sampling does not fill the batch within ``max_refills`` further rounds.
        """
        wanted = self.config.prompts
        assert wanted is not None
        kept: list[Rollouts] = []
        records: list[dict[str, Any]] = []
        seconds = {"generate": 0.0, "score": 0.0}
        have = drawn = rounds = 0
        while have < wanted:
            if rounds > self.config.max_refills:
                raise _exhausted(have, wanted, rounds, drawn, self.config.max_refills)
            ask = _ask(wanted, have, drawn)
            batch, made = self._round(step, rounds, cursor, ask, drawn, seconds)
            self._check_verdicts(batch, made, step, rounds)
            cursor, drawn, rounds = cursor + ask, drawn + ask, rounds + 1
            groups = self._usable(batch)[: wanted - have]
            have += len(groups)
            rows = torch.isin(batch.group, torch.tensor(groups, dtype=torch.int64))
            for record, taken in zip(made, rows.tolist(), strict=True):
                record["kept"] = taken
            records += made
            if groups:
                kept.append(batch[rows])
        whole = concatenate(kept)
        whole = whole.replace(group=torch.unique(whole.group, return_inverse=True)[1])
        return Collected(whole, records, cursor, rounds, drawn, seconds)

    def _usable(self, batch: Rollouts) -> list[int]:
        """Groups that may be trained on: all of them, unless the algorithm selects."""
        if not self.algorithm.selection:
            return torch.unique(batch.group).tolist()
        usable = kenpo.select(self.algorithm, batch)
        return torch.unique(batch.group[usable]).tolist()

    def _round(
        self, step: int, round_: int, cursor: int, ask: int, first_group: int, seconds: dict[str, float]
    ) -> tuple[Rollouts, list[dict[str, Any]]]:
        """Sample and score `ask` problems, each rank its share; the whole on every rank."""
        mine = self.ranks.share(ask)
        problems = [self.task.train(cursor + i) for i in mine]
        prompts = [self.prompts.encode(p) for p in problems]
        size = self.config.group_size
        assert size is not None
        seeds = [[stable_seed(self.config.seed, step, round_, cursor + i, j) for j in range(size)] for i in mine]
        with all_stop(self.ranks):
            completions, verdicts = self._sample(problems, prompts, seeds, seconds)
        batch = None
        if problems:
            batch = build_rollouts(
                problems, prompts, completions, verdicts, first_group=first_group + mine.start,
                with_support=self.options.top_p < 1 or self.options.top_k > 0, dtype=self.dtype,
            )  # fmt: skip
        records = [
            {"step": step, "round": round_, **describe(problem, j, c, v)}
            for problem, cs, vs in zip(problems, completions, verdicts, strict=True)
            for j, (c, v) in enumerate(zip(cs, vs, strict=True))
        ]
        return self.ranks.gather_rollouts(batch), self.ranks.gather_list(records)

    def _sample(
        self, problems: list[Problem], prompts: list[list[int]], seeds: list[list[int]], seconds: dict[str, float]
    ) -> tuple[list[list[Completion]], list[list[Verdict]]]:
        """Completions and their verdicts. An engine that streams has each group judged while it samples the others."""
        if not problems:
            return [], []
        began = time.perf_counter()
        with Judge(self.verifier) as judge:
            if getattr(self.engine, "streams", False):
                done: dict[str, Any] = {"done": lambda p, group: judge.put(p, problems[p], group)}
                completions = self.engine.generate(prompts, seeds, self.options, **done)
            else:
                completions = self.engine.generate(prompts, seeds, self.options)
                for p, group in enumerate(completions):
                    judge.put(p, problems[p], group)
            sampled = time.perf_counter()
            verdicts = judge.verdicts()
        seconds["generate"] += sampled - began
        seconds["score"] += time.perf_counter() - sampled
        return completions, [verdicts[p] for p in range(len(problems))]

    def _check_verdicts(self, batch: Rollouts, records: list[dict[str, Any]], step: int, round_: int) -> None:
        if not bool(batch.rewards.isnan().all()):
            return
        first = records[0]
        what = (
            f"verifier {self.verifier.name!r} gave no verdict on any of the {len(records)} samples of step {step}; "
            f"the first: {first['status']}{': ' + first['detail'] if first['detail'] else ''}"
        )
        raise VerifierError(what) if step == 1 and round_ == 0 else RunError(what)


def sampling_options(config: TrainConfig) -> SamplingOptions:
    """How training samples are drawn."""
    assert config.max_tokens is not None
    return SamplingOptions(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop=config.stop,
    )


def _ask(wanted: int, have: int, drawn: int) -> int:
    """Problems of the next round: all that are wanted at first, then the missing ones over the share kept so far."""
    if not drawn:
        return wanted
    rate = max(have / drawn, 0.25)
    return min(wanted, math.ceil((wanted - have) / rate))


def _exhausted(have: int, wanted: int, rounds: int, drawn: int, refills: int) -> RefillExhaustedError:
    return RefillExhaustedError(
        f"dynamic sampling kept {have} of {wanted} needed groups after {rounds} rounds of generation "
        f"({drawn} prompts drawn, --max-refills {refills}): the other groups' outcomes don't differ; "
        "allow more rounds with --max-refills, or choose problems that the model neither always nor never solves"
    )
