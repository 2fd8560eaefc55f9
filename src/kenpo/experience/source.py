"""Where rollout batches come from: the protocol of a source, and the source that samples from the current policy.

A source keeps nothing that a resumed run would miss: what it needs for the next batch it hands out as `Collected.state`
(nested dicts and lists of JSON values and tensors) and gets back. It imports no algorithm; the trainer hands it the
algorithm's priorities and its selection as a function.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kenpo.batches import concatenate
from kenpo.contexts import has_context
from kenpo.engines.base import Engine, Request, SamplingOptions
from kenpo.episode import Episode
from kenpo.errors import RefillExhaustedError, RunError, VerifierError
from kenpo.experience.draw import draw_prioritised
from kenpo.experience.episode import Row, build_rollouts
from kenpo.experience.evaluate import Evaluator
from kenpo.experience.guided import GUIDED, Guide
from kenpo.experience.hints import HINT, Hints
from kenpo.experience.judge import Judge, all_stop, describe, sample_groups
from kenpo.experience.mixture import Group, Member, Mixture, is_own, is_row
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.targets import targets_of
from kenpo.experience.tasks import Task
from kenpo.experience.verdict import Verdict, Verifier
from kenpo.ranks import Ranks
from kenpo.seeds import stable_seed
from kenpo.types import Policy, Rollouts

State = Any
"""Nested dicts and lists of JSON values and tensors."""
Priorities = Mapping[int, float]
"""Weight of each problem by its id."""
Usable = Callable[[Rollouts], Tensor]
"""Which rollouts the algorithm trains on, [B] bool."""
Score = Callable[..., Policy]
"""(rollouts, wanted fields = logp): the current policy's terms, no gradient, whole on every rank."""


@dataclass(frozen=True)
class Start:
    """Where a run stands before its next batch: after ``step`` steps, in ``folder``, which the ``first`` rank writes.
    ``score`` is the current policy, ``stands_on`` digests of what the run is made of."""

    score: Score
    folder: Path
    stands_on: Mapping[str, Any]
    step: int
    first: bool


@dataclass(frozen=True)
class Collected:
    """A filled batch, the same on every rank.

    ``records`` are lines for ``samples.jsonl``, one per sample drawn, kept or not; ``figures`` the source's part of the
    line in ``metrics.jsonl``; ``state`` what the next call gets; ``generated`` tokens sampled; ``seconds`` by activity.
    """

    rollouts: Rollouts
    records: list[dict[str, Any]] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)
    state: State = None
    generated: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """Makes rollout batches, and measures on what it holds out.

    ``headline`` names the held-out figure that stands in ``summary.json`` under ``eval``; ``heldout`` counts the items
    held out (0: nothing is measured); ``notes`` is what a run says of its data before it begins. A class may derive
    from this one and inherit a `measure` that finds nothing.
    """

    headline: str = ""
    heldout: int = 0
    notes: Sequence[str] = ()

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The batch of `step`. ``state`` is what the last call handed out, None at first. The same arguments and
        weights give the same batch, on any number of ranks."""
        ...

    def begin(self, start: Start) -> None:
        """Called once, before the run's next batch and its first measurement, on every rank."""
        return None

    def measure(self, score: Score) -> dict[str, Any]:
        """Held-out figures of the current weights, ``{"sum", "count"}`` each; the same on every rank."""
        return {}


#: Fields of `Rollouts` that `OnPolicy` fills where an algorithm reads them.
FURTHER = frozenset({"topk_ids", "topk_logp_sampler", "target_ids", "target_prob", "prompt_mask"})
POOL = 512  # problems of an endless task that are drawn by priority
TOP = 20  # likeliest tokens that the sampler then records, as DPPO has it


@dataclass(frozen=True)
class BatchOptions:
    """How `OnPolicy` fills a batch.

    ``refill``: after a group that can't be trained on, sample the ``same`` problem again or go on to the ``next``.
    ``baseline``: one greedy response per prompt beside the samples, whose reward stands in `Rollouts.baseline`.
    ``also``: further fields of `Rollouts` to fill. ``prioritised``: the algorithm will say which problems to prefer.
    """

    prompts: int = 16
    group_size: int = 8
    max_refills: int = 9
    refill: str = "next"
    seed: int = 0
    correct_at: float = 1.0
    baseline: bool = False
    dtype: torch.dtype = torch.float32
    also: tuple[str, ...] = ()
    prioritised: bool = False


class OnPolicy(Source):
    """Problems become prompts, the engine samples, the verifier judges, and dynamic sampling asks for more.

    Every sample's seed is a hash of the run's seed, the step, the round, the problem's place and the sample's number,
    so a resumed run, or one with more ranks, draws the same samples. Its state is ``{"cursor": n}``: the index of the
    next unused problem of the stream. With priorities the problems are drawn from the whole task by weight instead.
    """

    headline = "eval/accuracy"

    def __init__(
        self, task: Task, verifier: Verifier, engine: Engine, prompts: Prompts, ranks: Ranks, options: BatchOptions,
        sampling: SamplingOptions, evaluator: Evaluator | None = None, hints: Hints | None = None,
        mixture: Mixture | None = None, guide: Guide | None = None,
    ) -> None:  # fmt: skip
        self.task, self.verifier, self.engine, self.prompts, self.ranks = task, verifier, engine, prompts, ranks
        self.options, self.sampling, self.evaluator = options, sampling, evaluator
        self.hints, self.mixture, self.guide = hints, mixture, guide
        self.heldout = len(evaluator.problems) if evaluator else 0
        self.notes = (*getattr(task, "notes", ()), *getattr(prompts, "notes", ()))
        if options.prioritised and task.ids is None:
            self.notes += (f"task {task.name} is endless: problems are drawn by priority from its first {POOL}",)
        self.also = (["support_ids"] if sampling.truncates else []) + (["baseline"] if options.baseline else [])
        self.also += ["origin"] if mixture else []
        self.also += options.also

    @functools.cached_property
    def pool(self) -> Sequence[int]:
        """The problems that are drawn by priority: all of them, or the first of an endless task."""
        return self.task.ids or list(dict.fromkeys(self.task.train(i).id for i in range(POOL)))

    def measure(self, score: Score) -> dict[str, Any]:
        """Greedy accuracy and its kin on the held-out problems."""
        return self.evaluator.measure() if self.evaluator else {}

    def next(
        self, step: int, state: State, priorities: Priorities | None = None, usable: Usable | None = None
    ) -> Collected:
        """The batch of `step`.

        Raises `VerifierError` if the run's first round has no verdict at all, `RunError` if a later one has none, and
        `RefillExhaustedError` if dynamic sampling does not fill the batch within ``max_refills`` further rounds.
        """
        wanted = self.options.prompts
        cursor = int((state or {}).get("cursor", 0))
        stream = _Stream(self.task, cursor, self.options, step, priorities, self.pool if priorities else ())
        if self.mixture is not None:
            self.mixture.begin((state or {}).get("mixture"))
        kept: list[Rollouts] = []
        records: list[dict[str, Any]] = []
        seconds = {"generate": 0.0, "score": 0.0}
        have = drawn = rounds = 0
        again: list[Drawn] = []
        while have < wanted:
            if rounds > self.options.max_refills:
                raise _exhausted(have, wanted, rounds, drawn, self.options.max_refills)
            asked = again[: wanted - have] if again else stream.take(_ask(wanted, have, drawn))
            batch, made = self._round(step, rounds, asked, drawn, seconds)
            self._check_verdicts(batch, made, step, rounds)
            good = set(torch.unique(batch.group if usable is None else batch.group[usable(batch)]).tolist())
            groups = sorted(good)[: wanted - have]
            if self.options.refill == "same":
                again = [d for n, d in enumerate(asked, drawn) if n not in good] + again[len(asked) :]
            drawn, rounds, have = drawn + len(asked), rounds + 1, have + len(groups)
            rows = torch.isin(batch.group, torch.tensor(groups, dtype=torch.int64))
            marks = dict(zip(_numbers(made, is_row), rows.tolist(), strict=True))
            for number, record in enumerate(made):
                record["kept"] = marks.get(number, False)
            records += made
            if groups:
                kept.append(batch[rows])
        whole = concatenate(kept)
        whole = whole.replace(group=torch.unique(whole.group, return_inverse=True)[1])
        figures = sample_figures(records, self.options.correct_at)
        figures["groups_kept"] = {"sum": int(whole.group.unique().numel()), "count": drawn}
        figures["rounds"] = rounds
        if whole.hinted is not None:
            figures["hinted"] = {"sum": int(whole.hinted.sum()), "count": len(whole)}
        after: dict[str, Any] = {"cursor": stream.cursor}
        if self.mixture is not None:
            after["mixture"] = self.mixture.kept(self.ranks.gather_list(self.mixture.fresh()))
        return Collected(whole, records, figures, after, sum(map(tokens_sampled, records)), seconds)

    def _round(
        self, step: int, round_: int, asked: Sequence[Drawn], first_group: int, seconds: dict[str, float]
    ) -> tuple[Rollouts, list[dict[str, Any]]]:
        """Sample and judge the problems, each rank its share; the whole on every rank."""
        o = self.options
        groups: dict[int, tuple[Problem, list[Request]]] = {}
        for i in self.ranks.share(len(asked)):
            problem, prompt = asked[i].problem, tuple(self.prompts.encode(asked[i].problem))
            seeds = [stable_seed(o.seed, step, round_, asked[i].place, j) for j in range(o.group_size)]
            shown = [prompt if self.guide is None else self.guide.prompt(problem, j, prompt) for j in range(len(seeds))]
            groups[i] = (problem, [Request(ids, seed, self.sampling) for ids, seed in zip(shown, seeds, strict=True)])
            if o.baseline:
                groups[_baseline(i)] = (problem, [Request(prompt, 0, self.sampling, greedy=True)])
        with all_stop(self.ranks):
            judged = self._sample(groups, seconds)
            made = {i: self._group(asked[i], *judged[i]) for i in judged if i >= 0}
            if self.mixture is not None:
                self.mixture.join(list(made.values()), step, round_)
        rows, records = [], []
        for i, (episodes, verdicts) in judged.items():
            if i < 0:
                greedy_record = describe(groups[i][0], 0, episodes[0], verdicts[0])
                records.append({"step": step, "round": round_, **greedy_record, "baseline": True})
                continue
            greedy = judged[_baseline(i)][1][0].reward if o.baseline else None
            records += [{"step": step, "round": round_, **record} for record in made[i].records()]
            rows += [_row(made[i].problem, m, first_group + i, greedy) for m in made[i].members]
        contexts = [n for n, there in ((HINT, self.hints), (GUIDED, self.guide)) if there is not None]
        batch = build_rollouts(rows, also=self.also, contexts=contexts, dtype=o.dtype) if rows else None
        whole = self.ranks.gather_rollouts(batch)
        if self.hints is not None:
            whole = whole.replace(hinted=has_context(whole, HINT))
        return whole, self.ranks.gather_list(records)

    def _group(self, drawn: Drawn, episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> Group:
        """A problem's samples after its plain prompt, with hinted or guided prompts beside them if there are any."""
        if self.guide is not None:
            plain = self.prompts.encode(drawn.problem)
            episodes = [self.guide.off_context(e, plain) for e in episodes]
        if self.hints is not None:
            episodes = self.hints.beside(drawn.problem, episodes, verdicts)
        return Group(drawn.place, drawn.problem, [Member(e, v) for e, v in zip(episodes, verdicts, strict=True)])

    def _sample(
        self, groups: Mapping[int, tuple[Problem, list[Request]]], seconds: dict[str, float]
    ) -> dict[int, tuple[list[Episode], list[Verdict]]]:
        """Each group's episodes and their verdicts; a group is judged while others are sampled."""
        if not groups:
            return {}
        began = time.perf_counter()
        with Judge(self.verifier) as judge:
            episodes = sample_groups(self.engine, judge, groups)
            sampled = time.perf_counter()
            verdicts = judge.verdicts()
        seconds["generate"] += sampled - began
        seconds["score"] += time.perf_counter() - sampled
        return {g: (episodes[g], verdicts[g]) for g in groups}

    def _check_verdicts(self, batch: Rollouts, records: list[dict[str, Any]], step: int, round_: int) -> None:
        if not bool(batch.rewards.isnan().all()):
            return
        first = records[0]
        what = (
            f"verifier {self.verifier.name!r} gave no verdict on any of the {len(records)} samples of step {step}; "
            f"the first: {first['status']}{': ' + first['detail'] if first['detail'] else ''}"
        )
        raise VerifierError(what) if step == 1 and round_ == 0 else RunError(what)


@dataclass(frozen=True)
class Drawn:
    """A problem and the number that its samples' seeds are made of."""

    problem: Problem
    place: int


class _Stream:
    """The problems of one step: from the cursor on, or by priority without repetition."""

    def __init__(
        self, task: Task, cursor: int, options: BatchOptions, step: int, priorities: Priorities | None,
        pool: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.task, self.cursor, self.left = task, cursor, None
        if priorities is not None:
            self.left = draw_prioritised(pool, priorities, stable_seed(options.seed, step, 0x7072))

    def take(self, count: int) -> list[Drawn]:
        """The next problems."""
        if self.left is not None:
            chosen, self.left = self.left[:count], self.left[count:]
            if not chosen:
                raise RunError(f"task {self.task.name}: every problem was drawn in this step and the batch isn't full")
            return [Drawn(self.task.problem(id_), id_) for id_ in chosen]
        first, self.cursor = self.cursor, self.cursor + count
        return [Drawn(self.task.train(i), i) for i in range(first, self.cursor)]


def _baseline(group: int) -> int:
    """The number under which a group's greedy response is judged, apart from the group."""
    return -1 - group


def _row(problem: Problem, member: Member, group: int, baseline: float | None) -> Row:
    """A sample as a row. Without a verdict on the greedy response its samples have nothing to be compared with."""
    verdict = member.verdict
    reward = math.nan if baseline is not None and math.isnan(baseline) else verdict.reward
    numbers = {} if baseline is None else {"baseline": baseline}
    valid, shares = targets_of(problem)
    return Row(
        member.episode, group, reward, problem.id, verdict.answer, verdict.parts, member.origin, numbers, valid, shares
    )


def _numbers(records: Sequence[Mapping[str, Any]], wanted: Callable[[Mapping[str, Any]], bool]) -> list[int]:
    """Places of the wanted records."""
    return [n for n, record in enumerate(records) if wanted(record)]


def tokens_sampled(record: Mapping[str, Any]) -> int:
    """Tokens that the policy sampled for the record: none of an expert's, and those on the way to a restated answer."""
    own = 0 if record.get("origin") == "expert" or record.get("buffered") else int(record["tokens"])
    return own + int(record.get("further_tokens", 0))


def sample_figures(everything: Sequence[Mapping[str, Any]], correct_at: float) -> dict[str, Any]:
    """Figures over every sample drawn, also those filtered out; rewards and lengths over those with a verdict.

    What the policy did not sample on the plain prompt has figures of its own, ``expert/…`` and ``rephrased/…``.
    """
    records = [r for r in everything if is_own(r)]
    judged = [r for r in records if r["reward"] is not None]
    right = [r for r in judged if r["reward"] >= correct_at]
    wrong = [r for r in judged if r["reward"] < correct_at]
    figures: dict[str, Any] = {
        "reward": _mean(judged, lambda r: r["reward"]),
        "correct": {"sum": len(right), "count": len(judged)},
        "no_verdict": {"sum": len(records) - len(judged), "count": len(records)},
        "verifier_error": _mean(records, lambda r: r["status"] == "error"),
        "verifier_timeout": _mean(records, lambda r: r["status"] == "timeout"),
        "verifier_abstain": _mean(records, lambda r: r["status"] == "abstain"),
        "truncated": _mean(records, lambda r: r["truncated"]),
        "length": _mean(records, lambda r: r["tokens"]),
        "length_correct": _mean(right, lambda r: r["tokens"]),
        "length_wrong": _mean(wrong, lambda r: r["tokens"]),
    }
    for name in sorted({n for r in records for n in r["parts"]}):
        values = [r["parts"][name] for r in records if r["parts"].get(name) is not None]
        figures[f"part/{name}"] = {"sum": math.fsum(values), "count": len(values)}
    for name in sorted({r["origin"] for r in everything if "origin" in r}):
        others = [r for r in everything if r.get("origin") == name]
        figures[f"{name}/rows"] = {"sum": sum(map(is_row, others)), "count": len(others)}
        figures[f"{name}/reward"] = _mean([r for r in others if r["reward"] is not None], lambda r: r["reward"])
        figures[f"{name}/length"] = _mean(others, lambda r: r["tokens"])
    return figures


def _mean(records: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> dict[str, float]:
    return {"sum": math.fsum(value(r) for r in records), "count": len(records)}


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
