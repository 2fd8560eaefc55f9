"""One rollout batch into optimizer steps: the passes that come before, the minibatches, and what each of them did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kenpo
from kenpo import schedules
from kenpo.fields import EXPERT, REPLAYED
from kenpo.learner import critic as critics
from kenpo.learner.critic import Critic, Rates
from kenpo.learner.figures import Figures, Report
from kenpo.learner.gate import Gate
from kenpo.learner.learner import Learner
from kenpo.learner.minibatches import minibatches
from kenpo.learner.optimizer import learning_rate
from kenpo.learner.planning import Passes
from kenpo.learner.staleness import age_figures, all_fresh, fresh_enough, gap_of_the_fresh
from kenpo.models.agreement import agreement, looked_at
from kenpo.models.passes import prompt_keys
from kenpo.models.scorer import LISTED, LOGP, Scorer
from kenpo.runs.checkpoint import Part
from kenpo.trainer.config import RunConfig
from kenpo.types import Prepared, Rollouts


class Updater:
    """Trains a learner on rollout batches, with one algorithm and a plan of its passes."""

    def __init__(
        self, learner: Learner, algorithm: Any, config: RunConfig, passes: Passes, reference: Scorer | None = None,
        critic: Critic | None = None,
    ) -> None:  # fmt: skip
        self.learner, self.algorithm, self.config = learner, algorithm, config
        self.given = algorithm  # before anything moves
        self.version = 0  # of the weights that the present batch meets
        self.passes, self.reference, self.critic = passes, reference, critic
        self.further: Callable[[], Part] | None = None
        self.gate = Gate(config.gate, config.gate_bound, config.top_p) if config.gate else None

    def at(self, step: int) -> Any:
        """The algorithm in force at a step: some of its numbers may move along the run (`--schedule`)."""
        self.algorithm = schedules.at_step(self.given, self.config.moving, step - 1)
        return self.algorithm

    def further_part(self) -> Part | None:
        """What a checkpoint holds of a further model: a critic with a model of its own, or a partner."""
        if self.further is not None:
            return self.further()
        own = self.critic and self.critic.own
        return Part(critics.FOLDER, own.scorer.model, own.scorer.heads, own.state()) if own else None

    def score(self, rollouts: Rollouts, prompts: Sequence[int], seconds: dict[str, float]) -> Rollouts:
        """`rollouts` with the old and the reference log-probs that the plan asks for."""
        own, average = self.learner.scorer, self.learner.average
        for name, wanted, scorer, context in (
            ("logp_old", self.passes.old, own, None),
            ("logp_ref", self.passes.reference and "logp_ref" in self.algorithm.needs, self.reference, None),
            ("logp_prox", "logp_prox" in self.algorithm.needs, average.scorer if average else None, None),
            ("logp_guided", "logp_guided" in self.algorithm.needs, own, "guided"),
            ("logp_teacher", "logp_teacher" in self.algorithm.needs, own.teacher, own.teacher_context),
        ):
            if wanted and getattr(rollouts, name) is None:
                began = time.perf_counter()
                keys = prompts if context is None else None
                listed = name == "logp_old" and "topk_logp_old" in self.algorithm.needs
                terms = self.learner.terms(rollouts, LISTED if listed else LOGP, keys, scorer, context)
                made = {name: terms.logp, "topk_logp_old": terms.topk_logp}
                rollouts = rollouts.replace(**{n: x.to(rollouts.mask.device) for n, x in made.items() if x is not None})
                seconds[name.removeprefix("logp_")] = time.perf_counter() - began
        return rollouts

    def update(self, rollouts: Rollouts, state: Any, step: int, version: int = 0) -> Report:
        """Prepare the batch, then take its optimizer steps: ``epochs`` times ``minibatches`` of them.

        ``version`` counts the updates done before. Rows that are too old leave first; with none left nothing is done.
        """
        self.at(step)
        seconds: dict[str, float] = {}
        drawn = len(rollouts)
        rollouts, dropped = fresh_enough(rollouts, version, self.config.max_staleness)
        if not len(rollouts):
            return Report(rollouts, state, {"dropped_stale": [dropped, drawn]})
        prompts = prompt_keys(rollouts)
        parity = self.gate.check(self.learner, rollouts, step, version) if self.gate else {}
        if self.learner.snapshot is not None:
            self.learner.snapshot.follow()
        rollouts = self.score(rollouts, prompts, seconds)
        if self.critic is not None:
            rollouts = self.critic.look(self.algorithm.needs, rollouts, prompts, seconds)
        prepared = kenpo.prepare(self.algorithm, rollouts, state)
        rates = self.rates(step)
        report = Report(rollouts, prepared.state, lr=rates.policy or 0.0, seconds=seconds)
        report.extremes |= parity
        trained = (rollouts.mask & prepared.selected.unsqueeze(1)).sum(1)
        self.version = version
        if self.config.max_staleness is not None:
            report.add("dropped_stale", dropped, drawn)
        if not all_fresh(rollouts, version) and (gap := gap_of_the_fresh(rollouts, version)) is not None:
            report.extremes["sampler_gap"] = gap
        report.trained = int(trained.sum())
        given = rollouts.supervised
        if rollouts.origin is not None:
            given = given | (rollouts.origin == EXPERT) | (rollouts.origin == REPLAYED)
        given = given if rollouts.logp_source is None else given | rollouts.logp_source.isfinite()
        report.foreign = int(trained[given].sum())
        report.add("selected", float(prepared.selected.sum()), len(rollouts))
        for name, (total, count) in {**critics.figures(prepared), **self._agreement(rollouts)}.items():
            report.add(name, total, count)
        began = time.perf_counter()
        for epoch in range(self.config.epochs):
            for rows in minibatches(prepared.rollouts, self.config.minibatches, self.config.seed, step, epoch):
                self._one_update(prepared[rows], [prompts[r] for r in rows], report, rates)
        seconds["update"] = time.perf_counter() - began
        return report

    def _agreement(self, rollouts: Rollouts) -> Mapping[str, tuple[float, float]]:
        """How far a teacher agrees with the policy before the update; nothing where none teaches."""
        scorer = self.learner.scorer
        rows = looked_at(rollouts, self.config.microbatch_tokens) if scorer.teacher is not None else []
        return agreement(scorer, rollouts[rows]) if rows else {}

    def rates(self, step: int) -> Rates:
        """The learning rates of `step`. The policy's course begins after the steps in which the critic learns alone;
        the critic's has no warm-up, since its first task is to catch up."""
        config, alone, how = self.config, self.config.critic_warmup, self.config.course
        policy = None
        if step > alone:
            left = config.steps - alone
            policy = learning_rate(step - alone, lr=config.lr, warmup=config.warmup, steps=left, schedule=how)
        if self.critic is None:
            return Rates(policy)
        lr = critics.RATE * config.lr if config.critic_lr is None else config.critic_lr
        return Rates(policy, learning_rate(step, lr=lr, warmup=0, steps=config.steps, schedule=how))

    def _one_update(self, minibatch: Prepared, prompts: Sequence[int], report: Report, rates: Rates) -> None:
        """One optimizer step of each learner; none for a minibatch without a trainable token, where AdamW would move by
        momentum."""
        if not bool((minibatch.rollouts.mask & minibatch.selected.unsqueeze(1)).any()):
            report.add("update_skipped", 1.0, 1.0)
            return
        report.add("update_skipped", 0.0, 1.0)
        for name, (total, count) in age_figures(minibatch.rollouts, self.version + report.updates).items():
            report.add(name, total, count)
        report.add("loss", 0.0, 1.0)
        weighed = None
        if self.critic is not None and self.critic.own is not None:
            own = self.critic.own
            weighed = self.learner.weigh(minibatch, self.algorithm, prompts)
            self._take(own.gradient(minibatch, self.algorithm, prompts, weighed), minibatch, report, ("idle",))
            report.add("critic_grad_norm", own.step(rates.critic, rates.critic), 1.0)
            if rates.policy is None:
                return
        self._take(self.learner.gradient(minibatch, self.algorithm, prompts, weighed), minibatch, report)
        report.add("grad_norm", self.learner.step(rates.policy, rates.critic), 1.0)
        report.updates += rates.policy is not None

    def _take(self, figures: Figures, minibatch: Prepared, report: Report, without: Sequence[str] = ()) -> None:
        """What a learner measured, into the report."""
        sums, extremes = figures.read(self.learner.ranks)
        moved = report.updates and minibatch.rollouts.logp_old is None
        stale = not all_fresh(minibatch.rollouts, self.version)
        if moved or stale or self.algorithm.advantage.mixture:  # another policy sampled: no fault of the sampler
            gap = extremes.pop("sampler_gap", None)
            if stale and not moved and gap is not None:
                extremes["sampler_drift"] = gap
        for name, (total, count) in sums.items():
            if name not in without:
                report.add(name, total, count)
        for name, value in extremes.items():
            report.extremes[name] = max(report.extremes.get(name, -math.inf), value)
