"""One rollout batch: problems become prompts, the engine samples, the verifier judges, dynamic sampling asks for more.

Every sample's seed is a hash of the run's seed, the step, the round, the problem's index and the sample's number, so a
resumed run, or one with more ranks, draws the same samples.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kenpo
from kenpo.batches import concatenate
from kenpo.engines.base import Completion, Engine, SamplingOptions
from kenpo.errors import RefillExhaustedError, RunError, VerifierError
from kenpo.experience.tasks import Problem, Task
from kenpo.experience.verifiers import Sample, Verdict, Verifier
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.distributed import Ranks
from kenpo.trainer.prompts import Prompts
from kenpo.types import Rollouts


def stable_seed(*parts: int) -> int:
    """A 63-bit seed from integers, the same on every machine and in every process."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def answer_id(answer: str | None) -> int:
    """The identity of an extracted answer as `Rollouts.answer` holds it; -1 for none."""
    if answer is None:
        return -1
    return int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=8).digest(), "big") >> 1


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
        began = time.perf_counter()
        completions = self.engine.generate(prompts, seeds, self.options) if problems else []
        seconds["generate"] += time.perf_counter() - began
        began = time.perf_counter()
        verdicts = score(self.verifier, problems, completions)
        seconds["score"] += time.perf_counter() - began
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


def score(
    verifier: Verifier, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
) -> list[list[Verdict]]:
    """A verdict per completion, in the same nesting."""
    samples = [
        Sample(completion=c.text, answer=p.answer, prompt=p.prompt, truncated=c.truncated, extra=p.extra)
        for p, cs in zip(problems, completions, strict=True)
        for c in cs
    ]
    flat = iter(verifier.score(samples) if samples else [])
    return [[next(flat) for _ in cs] for cs in completions]


def describe(problem: Problem, number: int, completion: Completion, verdict: Verdict) -> dict[str, Any]:
    """One line of ``samples.jsonl``."""
    return {
        "problem": problem.id,
        "sample": number,
        "prompt": problem.prompt,
        "completion": completion.text,
        "tokens": len(completion.tokens),
        "truncated": completion.truncated,
        "reward": None if math.isnan(verdict.reward) else float(verdict.reward),
        "parts": {n: None if math.isnan(v) else float(v) for n, v in verdict.parts.items()},
        "status": verdict.status,
        "extracted": verdict.answer,
        "answer": problem.answer,
        "detail": verdict.detail,
    }


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
