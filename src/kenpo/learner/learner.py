"""A scorer that learns: minibatches become gradients, gradients steps. The only code that knows how ranks share work.

The algorithm maps terms to one coefficient per entry of a term; a microbatch only has to run the model and hand these
numbers to the backward pass. So the gradient does not depend on how a minibatch was cut, over microbatches or over
ranks. All ranks make the same calls in the same order: equally many microbatches, empty ones if need be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kenpo
from kenpo.checks import checked_at_the_end
from kenpo.contexts import at_own_places, in_context
from kenpo.learner.average import AVERAGED, Average
from kenpo.learner.cutting import cut, cut_groups
from kenpo.learner.figures import Figures
from kenpo.learner.idle import idle_rows
from kenpo.learner.optimizer import Optimizer, OptimizerOptions
from kenpo.models.lora import is_adapted, merged_state
from kenpo.models.passes import prompt_keys, to_device
from kenpo.models.scorer import LOGP, Scorer
from kenpo.ranks import Ranks
from kenpo.stages.base import Scope, reads_policy, snake
from kenpo.types import POLICY_FIELDS, Batch, Policy, Prepared, Rollouts


@dataclass(frozen=True)
class LearnerOptions:
    """``microbatch_tokens``: the most tokens that a pass with gradient holds, a shared prompt once. ``measured``: terms
    that no stage reads but figures are made of (entropy)."""

    microbatch_tokens: int = 16384
    measured: frozenset[str] = frozenset()
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)


class Weighed(NamedTuple):
    """A minibatch on the model's device with weights and totals; its terms, where two phases need them beforehand."""

    batch: Batch
    terms: Policy | None


class Learner:
    """A `Scorer` with an optimizer, on one rank of several.

    Several learners may train on one algorithm, a policy and its critic: each asks for the coefficients of those fields
    that its scorer makes. Raises what the optimizer raises when it is made.
    """

    def __init__(self, scorer: Scorer, options: LearnerOptions | None = None, ranks: Ranks | None = None) -> None:
        self.scorer, self.options, self.ranks = scorer, options or LearnerOptions(), ranks or Ranks()
        self.optimizer = Optimizer(scorer.named_parameters(), self.options.optimizer)
        self.average: Average | None = None  # of the policy, followed after each step
        self.snapshot: Average | None = None  # the policy as it was before the batch

    def fields(self, algorithm: Any) -> frozenset[str]:
        """The Policy fields that this learner makes and the algorithm sends gradients to."""
        return (algorithm.reaches | (algorithm.needs & POLICY_FIELDS.keys())) & self.scorer.makes

    # -- without gradient -------------------------------------------------------------------------------------------

    def terms(
        self, rollouts: Rollouts, want: frozenset[str] = LOGP, prompts: Sequence[int] | None = None,
        scorer: Scorer | None = None, context: str | None = None,
    ) -> Policy:  # fmt: skip
        """The wanted terms of the whole batch under `scorer` (None: this learner's own): each rank runs its part, every
        rank gets all, on the scorer's device. `prompts` and `context` as in `Scorer.terms`."""
        if context is not None:
            terms = self.terms(in_context(rollouts, context), want, prompts, scorer)
            return Policy(**at_own_places(terms.tensors(), rollouts))
        scorer = scorer or self.scorer
        keys = prompt_keys(rollouts) if prompts is None else prompts
        with torch.no_grad():
            mine = self._cut(rollouts, range(len(rollouts)), keys, scorer)
            # Zeros of the right kind, which this rank's rows are put into and the other ranks' are added to.
            nothing = rollouts.replace(mask=torch.zeros_like(rollouts.mask))
            whole = {n: v.clone() for n, v in scorer.terms(nothing, want, keys).tensors().items()}
            for rows in mine:
                if not rows:
                    scorer.idle_pass()
                    continue
                part = scorer.terms(rollouts[rows], want, [keys[r] for r in rows])
                for name, value in part.tensors().items():
                    whole[name][to_device(torch.tensor(rows), value.device)] = value
        rows = [r for part in mine for r in part]
        return Policy(**{n: self.ranks.combine_rows(rows, whole[n]) for n in sorted(whole)})

    # -- the gradient -----------------------------------------------------------------------------------------------

    def weigh(self, minibatch: Prepared, algorithm: Any, prompts: Sequence[int] | None = None) -> Weighed:
        """Weights and totals of a minibatch; with the terms of all its rows if the algorithm asks for two phases."""
        keys = prompt_keys(minibatch.rollouts) if prompts is None else prompts
        prepared = minibatch if self.scorer.device.type == "cpu" else minibatch.to(self.scorer.device)
        rollouts = minibatch.rollouts
        if not self._in_two_phases(minibatch, algorithm, keys):
            return Weighed(kenpo.weigh(algorithm, prepared), None)
        terms = self.terms(rollouts, self.fields(algorithm) | self.options.measured, keys)
        return Weighed(kenpo.weigh(algorithm, prepared, terms), terms)

    def _in_two_phases(self, minibatch: Prepared, algorithm: Any, keys: Sequence[int]) -> bool:
        rollouts = minibatch.rollouts
        if not algorithm.two_phase(rollouts):
            return False
        if not algorithm.whole_groups(rollouts):
            return True
        budget = self.options.microbatch_tokens
        return cut_groups(self.scorer, rollouts, _places(minibatch.selected), keys, budget) is None

    def gradient(
        self, minibatch: Prepared, algorithm: Any, prompts: Sequence[int] | None = None, weighed: Weighed | None = None
    ) -> Figures:
        """The minibatch's gradient into ``.grad``, added over microbatches and ranks; what was measured meanwhile.

        `minibatch` lies where it was collected. `prompts` are numbers of its rows, equal where the prompt is the same
        (None: found by the tokens). `weighed` is what another learner's `weigh` gave for the same minibatch.
        Rollouts whose coefficients are all 0 run no backward pass: with two phases that is known of each, with one it
        is told by the advantages, and their terms are measured without gradient.
        """
        keys = prompt_keys(minibatch.rollouts) if prompts is None else prompts
        self.optimizer.zero_grad()
        batch, terms = self.weigh(minibatch, algorithm, keys) if weighed is None else weighed
        task = _Task(self, minibatch.rollouts, keys, algorithm, batch)
        with checked_at_the_end():
            idle = self._work_off(task, minibatch, terms)
        if self.ranks.first:
            task.figures.add("idle", float(idle.sum()), float(minibatch.selected.sum()))
        self.ranks.add_gradients(self.optimizer.parameters())
        return task.figures

    def _work_off(self, task: _Task, minibatch: Prepared, terms: Policy | None) -> Tensor:
        """Every microbatch of the minibatch; [B] bool: the selected rows that ran no backward pass."""
        rollouts, keys, selected = minibatch.rollouts, task.keys, task.batch.prepared.selected
        if terms is not None and task.of <= terms.tensors().keys():
            idle = task.know(terms, count=self.ranks.first)
            task.run(self._cut(rollouts, _places(selected & ~idle), keys))
            return idle
        idle = idle_rows(task.algorithm, task.batch)
        groups = couples_rollouts(task.algorithm, task.of)
        task.measure(self._cut(rollouts, _places(idle), keys, groups=groups))
        task.run(self._cut(rollouts, _places(selected & ~idle), keys, groups=groups), groups)
        return idle

    def _cut(
        self, rollouts: Rollouts, rows: Sequence[int], keys: Sequence[int], scorer: Scorer | None = None,
        groups: bool = False,
    ) -> list[list[int]]:  # fmt: skip
        """This rank's microbatches; of whole `groups`, where it is known that each fits into one."""
        made = (cut_groups if groups else cut)(
            scorer or self.scorer, rollouts, rows, keys, self.options.microbatch_tokens, self.ranks.size
        )
        assert made is not None
        return made[self.ranks.rank]

    def step(self, lr: float | None, scalar_lr: float | None = None) -> float:
        """Clip and take one optimizer step at rate `lr`, scalar heads at `scalar_lr` (see `Optimizer.step`); returns
        the gradient's norm before clipping."""
        norm = self.optimizer.step(lr, scalar_lr)
        if self.average is not None:
            self.average.follow()
        return norm

    # -- weights and state ------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the model as an engine loads it: an adapter is added in, scalar heads are left out."""
        model = self.scorer.model
        tensors: Mapping[str, Tensor] = merged_state(model) if is_adapted(model) else model.state_dict()
        yield from ((n, t.detach()) for n, t in tensors.items())

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts, master weights and a moving average by parameter name."""
        return self.optimizer.state() | (self.average.state() if self.average else {})

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `state` gave. RunError if it belongs to other parameters or another optimizer."""
        self.optimizer.load({n: t for n, t in tensors.items() if not n.startswith(AVERAGED)})
        if self.average is not None:
            self.average.load(tensors)


class _Task:
    """One minibatch on its way through one learner's model."""

    def __init__(self, learner: Learner, rollouts: Rollouts, keys: Sequence[int], algorithm: Any, batch: Batch) -> None:
        self.learner, self.rollouts, self.keys = learner, rollouts, keys
        self.algorithm, self.batch = algorithm, batch
        self.of = learner.fields(algorithm)
        self.figures = Figures()
        self.known: dict[str, Tensor] | None = None

    def know(self, terms: Policy, count: bool) -> Tensor:
        """Take up the coefficients from the terms of all rows; [B] bool: selected rows that have none but 0."""
        loss, found = kenpo.coefficients(self.algorithm, self.batch, terms, of=self.of)
        self.known = {n: g for n, g in found.items() if n == "logp" or bool(g.any())}
        if count:  # every rank holds the same figures of the whole minibatch
            self.figures.note(loss)
        moving = [(g != 0).reshape(len(g), -1).any(1) for g in self.known.values()]
        selected = self.batch.prepared.selected
        return selected & ~torch.stack(moving).any(0) if moving else selected

    def run(self, parts: list[list[int]], whole_groups: bool = False) -> None:
        """Forward and backward of each of these microbatches."""
        scorer, fresh = self.learner.scorer, self.rollouts.logp_old is None
        for rows in parts:
            if not rows:
                scorer.idle_pass()
                continue
            rollouts, at = self._part(rows)
            part = None if self.known is not None else self.batch[at]
            known = None if self.known is None else {n: g[at] for n, g in self.known.items()}
            if known is not None:
                want, divisible = frozenset(known), True
            else:
                want = self.of | self.learner.options.measured
                divisible = couples_tokens(self.algorithm, fresh) is None
            scorer.backward(
                rollouts, self._coefficients(part, known), want, [self.keys[r] for r in rows], divisible=divisible,
                units=_group_sizes(rollouts) if whole_groups else None,
            )  # fmt: skip
            self.learner.optimizer.collect()

    def _coefficients(self, part: Batch | None, known: dict[str, Tensor] | None) -> Any:
        def coefficients(rows: slice, policy: Policy, measure: bool) -> dict[str, Tensor]:
            if known is not None:
                return {n: g[rows] for n, g in known.items()}
            assert part is not None
            loss, found = kenpo.coefficients(self.algorithm, part[rows], policy, measure, of=self.of)
            if measure:
                self.figures.note(loss)
            return found

        return coefficients

    def measure(self, parts: list[list[int]]) -> None:
        """The figures of rollouts without gradient."""
        scorer = self.learner.scorer
        for rows in parts:
            if not rows:
                with torch.no_grad():
                    scorer.idle_pass()
                continue
            rollouts, at = self._part(rows)
            policy = scorer.terms(rollouts, self.of | self.learner.options.measured, [self.keys[r] for r in rows])
            self.figures.note(kenpo.coefficients(self.algorithm, self.batch[at], policy, of=self.of)[0])

    def _part(self, rows: list[int]) -> tuple[Rollouts, Tensor]:
        """These rows as the model takes them, and their places where the terms lie."""
        return self.rollouts[rows], to_device(torch.tensor(rows), self.batch.advantages.device)


def couples_tokens(algorithm: Any, fresh: bool) -> str | None:
    """The first stage that makes a token's coefficient depend on other tokens of its rollout under the policy, or None.

    Without one, a rollout's coefficients can be told a few tokens at a time. ``fresh``: the batch has no ``logp_old``.
    """
    waiting = [s for s in algorithm.weights if reads_policy(s, fresh)]
    live = [algorithm.ratio, algorithm.surrogate, *algorithm.regularizers, *waiting]
    return next((snake(s) for s in live if s is not None and s.span > Scope.TOKEN), None)


def couples_rollouts(algorithm: Any, fields: frozenset[str]) -> bool:
    """Whether a stage with a gradient to one of these Policy fields looks at more than one rollout."""
    return any(s.span > Scope.SEQUENCE and s.reaches & fields for s in algorithm.live) or (
        any(s.span > Scope.SEQUENCE and s.policy_needs for s in algorithm.weights) and "logp" in fields
    )


def _group_sizes(rollouts: Rollouts) -> list[int]:
    """How many rows in a row belong to one group."""
    return [len(list(same)) for _, same in itertools.groupby(rollouts.group.tolist())]


def _places(rows: Tensor) -> list[int]:
    return [i for i, yes in enumerate(rows.tolist()) if yes]
