"""One rollout batch into optimizer steps, through one coefficient per token.

The algorithm maps log-probs to d loss / d logp; a microbatch only has to run the model and hand these numbers to the
backward pass (`kenpo.models.backward`). So the gradient does not depend on how a minibatch was cut, over microbatches
or over ranks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kenpo
from kenpo.models.backward import policy_backward
from kenpo.models.policy import pads_rows, policy_terms, shares_prompts
from kenpo.ranks import Ranks
from kenpo.seeds import stable_seed
from kenpo.trainer.config import TrainConfig
from kenpo.trainer.cutting import deal, microbatches, units
from kenpo.trainer.idle import idle_rows
from kenpo.trainer.optimizer import Optimizer, learning_rate
from kenpo.trainer.plan import Passes, couples_tokens
from kenpo.types import POLICY_FIELDS, Batch, Loss, Policy, Prepared, Rollouts

Sums = dict[str, list[float]]


@dataclass
class Report:
    """What one batch's updates did. ``sums`` name -> [sum, count]; ``extremes`` name -> maximum."""

    rollouts: Rollouts
    state: Any
    sums: Sums = field(default_factory=dict)
    extremes: dict[str, float] = field(default_factory=dict)
    updates: int = 0
    trained: int = 0
    lr: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        """Add to a summed figure."""
        entry = self.sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count


class Updater:
    """Runs the model on rollout batches and moves its parameters."""

    def __init__(
        self, model: Any, algorithm: Any, config: TrainConfig, passes: Passes, ranks: Ranks, reference: Any = None
    ) -> None:
        self.model, self.reference = model, reference
        self.algorithm, self.config, self.passes, self.ranks = algorithm, config, passes, ranks
        self.optimizer = Optimizer(model, config)
        self.differentiable = frozenset(algorithm.needs) & POLICY_FIELDS.keys() - {"logp"}
        self.how: dict[str, Any] = {
            "temperature": config.temperature, "reference": reference, "packing": config.packing,
        }  # fmt: skip
        self.want = self.differentiable | ({"entropy"} if passes.entropy else frozenset())

    # -- passes without gradient ------------------------------------------------------------------------------------

    @torch.no_grad()
    def terms(self, model: Any, rollouts: Rollouts, want: frozenset[str] = frozenset()) -> Policy:
        """Policy terms of the whole batch: each rank runs its share, every rank gets all. No gradient."""
        mine = self.cut(rollouts, range(len(rollouts)), model)
        whole: dict[str, Tensor] = {}
        for rows in mine:
            part = policy_terms(model, rollouts[rows], want=want, **self.how)
            for name, value in part.tensors().items():
                if name not in whole:
                    whole[name] = value.new_zeros((len(rollouts), *value.shape[1:]))
                whole[name][torch.as_tensor(rows, device=value.device)] = value
        if not whole:  # fewer rows than ranks: zeros of the right kind, filled by the others
            nothing = rollouts.replace(mask=torch.zeros_like(rollouts.mask))
            whole = policy_terms(model, nothing, want=want, **self.how).tensors()
        rows = [r for part in mine for r in part]
        return Policy(**{n: self.ranks.combine_rows(rows, v).cpu() for n, v in whole.items()})

    def cut(self, rollouts: Rollouts, rows: Iterable[int], model: Any) -> list[list[int]]:
        """This rank's share of `rows`, in microbatches."""
        budget = self.config.microbatch_tokens
        whole = units(rollouts, rows, budget, share=shares_prompts(model) is None)
        packed = pads_rows(model, self.config.packing) is None
        return microbatches(deal(whole, self.ranks), budget, packed)

    def score(self, rollouts: Rollouts, seconds: dict[str, float]) -> Rollouts:
        """`rollouts` with the old and the reference log-probs that the plan asks for."""
        for name, wanted, model in (
            ("logp_old", self.passes.old, self.model),
            ("logp_ref", self.passes.reference and "logp_ref" in self.algorithm.needs, self.reference),
        ):
            if wanted:
                began = time.perf_counter()
                rollouts = rollouts.replace(**{name: self.terms(model, rollouts).logp})
                seconds[name.removeprefix("logp_")] = time.perf_counter() - began
        return rollouts

    # -- the update ---------------------------------------------------------------------------------------------------

    def update(self, rollouts: Rollouts, state: Any, step: int) -> Report:
        """Prepare the batch, then take its optimizer steps: ``epochs`` times ``minibatches`` of them."""
        seconds: dict[str, float] = {}
        rollouts = self.score(rollouts, seconds)
        prepared = kenpo.prepare(self.algorithm, rollouts, state)
        report = Report(rollouts, prepared.state, lr=learning_rate(self.config, step), seconds=seconds)
        report.trained = int((rollouts.mask & prepared.selected.unsqueeze(1)).sum())
        report.add("selected", float(prepared.selected.sum()), len(rollouts))
        began = time.perf_counter()
        for epoch in range(self.config.epochs):
            for rows in self.minibatches(prepared, step, epoch):
                self.one_update(prepared[rows], report)
        seconds["update"] = time.perf_counter() - began
        return report

    def minibatches(self, prepared: Prepared, step: int, epoch: int) -> list[list[int]]:
        """Rows of each minibatch: whole groups, shuffled by a seed of their own where there is more than one."""
        number = self.config.minibatches
        if number == 1:
            return [list(range(len(prepared)))]
        group = prepared.rollouts.group
        names = torch.unique(group)
        generator = torch.Generator().manual_seed(stable_seed(self.config.seed, step, epoch, 0x6D62))
        order = names[torch.randperm(len(names), generator=generator)]
        number = min(number, len(names))
        cuts = [len(names) * i // number for i in range(number + 1)]
        return [torch.isin(group, order[a:b]).nonzero().squeeze(1).tolist() for a, b in itertools.pairwise(cuts)]

    def one_update(self, minibatch: Prepared, report: Report) -> None:
        """One optimizer step; none for a minibatch without a trainable token, where AdamW would move by momentum."""
        if not bool((minibatch.rollouts.mask & minibatch.selected.unsqueeze(1)).any()):
            report.add("update_skipped", 1.0, 1.0)
            return
        report.add("update_skipped", 0.0, 1.0)
        self.optimizer.zero_grad()
        self.gradient(minibatch, report)
        norm = self.optimizer.step(report.lr)
        report.add("grad_norm", norm, 1.0)
        report.updates += 1

    def gradient(self, minibatch: Prepared, report: Report) -> None:
        """The minibatch's gradient into ``.grad``, added over microbatches and ranks; its figures into `report`.

        Rollouts whose coefficients are all 0 run no backward pass: with two phases that is known of each, with one it
        is told by the advantages, and their terms are measured without gradient.
        """
        mine = _Figures()
        grads: dict[str, Tensor] | None = None
        if self.algorithm.two_phase(minibatch.rollouts):
            whole = self.terms(self.model, minibatch.rollouts, self.want)
            batch = kenpo.weigh(self.algorithm, minibatch, whole)
            loss, found = kenpo.coefficients(self.algorithm, batch, whole)
            grads = {n: g for n, g in found.items() if n == "logp" or bool(g.any())}
            idle = minibatch.selected & ~torch.stack([(g != 0).flatten(1).any(1) for g in grads.values()]).any(0)
            if self.ranks.first:  # every rank holds the same whole-minibatch figures: count them once
                mine.note(loss)
        else:
            batch = kenpo.weigh(self.algorithm, minibatch)
            idle = idle_rows(self.algorithm, batch)
            for rows in self.cut(minibatch.rollouts, _places(idle), self.model):
                self._measure(batch[rows], mine)
        for rows in self.cut(minibatch.rollouts, _places(minibatch.selected & ~idle), self.model):
            self._microbatch(batch[rows], None if grads is None else {n: g[rows] for n, g in grads.items()}, mine)
        report.add("idle", float(idle.sum()), float(minibatch.selected.sum()))
        if report.updates and minibatch.rollouts.logp_old is None:
            mine.extremes.pop("sampler_gap", None)  # π_θ has moved away from π_old: not the sampler's doing
        self._meet(report, mine)
        self.ranks.add_gradients(self.optimizer.parameters())

    def _microbatch(self, part: Batch, grads: dict[str, Tensor] | None, mine: _Figures) -> None:
        """One microbatch's gradient into ``.grad``: from known coefficients, or from those its own terms give."""
        rollouts = part.prepared.rollouts

        def shares(rows: slice, policy: Policy, measure: bool) -> dict[str, Tensor]:
            if grads is not None:
                return {n: g[rows] for n, g in grads.items()}
            loss, found = kenpo.coefficients(self.algorithm, part[rows], _at_home(policy), measure)
            if measure:
                mine.note(loss)
            return found

        if grads is not None:
            want, divisible = frozenset(grads) - {"logp"}, True
        else:
            want, divisible = self.want, couples_tokens(self.algorithm, rollouts.logp_old is None) is None
        policy_backward(self.model, rollouts, shares, want=want, divisible=divisible, **self.how)
        self.optimizer.collect()

    def _measure(self, part: Batch, mine: _Figures) -> None:
        """The figures of rollouts without gradient."""
        with torch.no_grad():
            policy = policy_terms(self.model, part.prepared.rollouts, want=self.want, **self.how)
        mine.note(kenpo.coefficients(self.algorithm, part, _at_home(policy))[0])

    def _meet(self, report: Report, mine: _Figures) -> None:
        """Add this minibatch's figures over the ranks into `report`."""
        for part in self.ranks.gather({"sums": mine.sums, "extremes": mine.extremes}):
            for name, (total, count) in part["sums"].items():
                report.add(name, total, count)
            for name, value in part["extremes"].items():
                report.extremes[name] = max(report.extremes.get(name, -math.inf), value)
        report.add("loss", 0.0, 1.0)


class _Figures:
    """One rank's figures of the current minibatch."""

    def __init__(self) -> None:
        self.sums: Sums = {}
        self.extremes: dict[str, float] = {}

    def note(self, loss: Loss) -> None:
        """Add a microbatch's share."""
        self.sums.setdefault("loss", [0.0, 0.0])[0] += float(loss.loss)
        for name, (total, count) in loss.sums.items():
            entry = self.sums.setdefault(name, [0.0, 0.0])
            entry[0] += float(total)
            entry[1] += float(count)
        for name, value in loss.extremes.items():
            self.extremes[name] = max(self.extremes.get(name, -math.inf), float(value))


def _places(rows: Tensor) -> list[int]:
    return rows.nonzero().squeeze(1).tolist()


def _at_home(policy: Policy) -> Policy:
    """The numbers without graph, on the CPU, where the rollouts live."""
    detached = policy.detach()
    return Policy(**{n: v.cpu() for n, v in detached.tensors().items()})
