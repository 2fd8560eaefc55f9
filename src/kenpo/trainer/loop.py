"""The training loop: collect, update, evaluate, write, and stop so that the run can go on."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import kenpo
from kenpo.errors import KenpoError, NonFiniteError, RefillExhaustedError, RunError
from kenpo.experience.source import Priorities, Start, Usable
from kenpo.models.clock import moment, set_clock
from kenpo.models.opening import settle_torch
from kenpo.ranks import Ranks
from kenpo.runs import folder as folders
from kenpo.runs.best import better, check_figure
from kenpo.runs.callbacks import Callback, make_loggers
from kenpo.runs.checkpoint import TrainerState, load_state, recorded_clock, restore_rng, seed_rng, versions
from kenpo.runs.continuing import check_processes
from kenpo.runs.figures import average, peak_memory, step_figures
from kenpo.runs.folder import RunFolder
from kenpo.runs.identity import Identity, recorded_identity, refuse_changes, tokenizer_entries
from kenpo.runs.signals import Asked, Interrupted
from kenpo.runs.watching import Watch
from kenpo.terminal import note, to_stderr
from kenpo.trainer.config import TrainConfig, resolve, to_dict
from kenpo.trainer.identity import identity
from kenpo.trainer.plan import checkpoint_room, notes
from kenpo.trainer.report import report
from kenpo.trainer.settle import already_finished, is_over, settle
from kenpo.trainer.setup import Parts, build
from kenpo.trainer.sources import open_inputs
from kenpo.types import Rollouts


def train(config: TrainConfig, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Run, or go on with, one training run; returns its summary (a dry run: ``{"plan": text}``).

    Bad input raises `InputError` before the run folder exists; what stops a run later raises `RunError`.
    """
    ranks = Ranks.start(config.device or resolve(config).device)
    try:
        run, folder, resumed = settle(config, ranks)
        show = to_stderr if ranks.first and not run.quiet else None
        with folder, open_inputs(run, show) as inputs:
            settle_torch(run.device, run.threads, run.deterministic == "on")
            if inputs.task is not None:
                run = run.but(verifier=run.verifier or inputs.task.verifier)
            checkpoint = folder.last_checkpoint() if resumed else None
            if resumed and is_over(folder, checkpoint, run):
                return already_finished(folder, run)
            stands_on = identity(run, inputs)
            if checkpoint:
                refuse_changes(recorded_identity(checkpoint), stands_on, checkpoint, run.accept_changes)
            set_clock(ranks.from_first((checkpoint and recorded_clock(checkpoint)) or time.time()))
            parts = build(run, inputs, ranks, checkpoint)
            # what was read before the model was there stands: rows may have been left out since
            stands_on = identity(run, inputs) | stands_on | tokenizer_entries(parts.tokenizer)
            if run.dry_run:
                held = parts.source.heldout
                return {"plan": report(parts.config, parts.algorithm, parts.passes, parts.facts, ranks.size, held)}
            everyone = [*callbacks, *make_loggers(run.loggers, note)] if ranks.first else []
            with parts.engine:
                return Run(parts, folder, everyone, checkpoint, resumed, stands_on).go()
    finally:
        ranks.close()


class Run:
    """One run in progress."""

    def __init__(
        self, parts: Parts, folder: RunFolder, callbacks: Sequence[Callback], checkpoint: Path | None, resumed: bool,
        stands_on: Identity,
    ) -> None:  # fmt: skip
        self.parts, self.folder, self.callbacks, self.resumed = parts, folder, callbacks, resumed
        self.config, self.ranks = parts.config, parts.ranks
        self.state = TrainerState(ranks=parts.ranks.size, threads=parts.config.threads, versions=versions())
        self.state.stands_on, self.state.clock = stands_on, moment()
        self.accepted: list[str] = []
        self.watch = Watch(parts.algorithm)
        self.began, self.base_seconds = time.perf_counter(), 0.0
        self.saved_at: int | None = None
        self.asked = Asked()
        if checkpoint is not None:
            self._restore(checkpoint)
        else:
            seed_rng(parts.config.seed)

    def _restore(self, checkpoint: Path) -> None:
        state, tensors, rng = load_state(checkpoint)
        told = check_processes(self.folder.path, state.ranks, self.ranks.size, self.config)
        self._say(filter(None, [told]))
        changed = [f"{n} {v} -> {versions().get(n)}" for n, v in state.versions.items() if versions().get(n) != v]
        if changed and self.ranks.first and not self.config.quiet:
            print(
                f"note: versions differ from the checkpoint's ({', '.join(changed)}): not bit for bit", file=sys.stderr
            )
        self.accepted = refuse_changes(state.stands_on, self.state.stands_on, checkpoint, self.config.accept_changes)
        state.versions, state.stands_on, state.ranks = versions(), self.state.stands_on, self.ranks.size
        self.parts.updater.learner.load(tensors)
        self.parts.engine.update(self.parts.updater.learner.weights, state.updates)
        self.parts.engine.load(state.engine)
        self.state, self.base_seconds, self.saved_at = state, state.seconds, state.step
        restore_rng(tensors, rng)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """From where the run stands to its end. A fresh run that meets bad input in its first step leaves no folder."""
        summary = None
        if self.ranks.first:
            if self.resumed:
                self.folder.cut_back(self.state)
                self.folder.record_anew(to_dict(self.config), self.state.step)
                if self.accepted:
                    self.folder.append("changes.jsonl", [{"step": self.state.step, "accepted": self.accepted}])
            else:
                self.folder.create(
                    to_dict(self.config), *checkpoint_room(self.config, self.parts.passes, self.parts.facts)
                )
        self._tell("on_start", self.config, self.folder.path, self.state.step)
        self._say([*self.parts.source.notes, *notes(self.parts.algorithm, self.config)])
        try:
            with self.asked.listening(self.ranks.first):
                score, state = self.parts.updater.learner.terms, self.state
                self.parts.source.begin(Start(score, self.folder.path, state.stands_on, state.step, self.ranks.first))
                self._steps()
            summary = self._finish()
            return summary
        except RefillExhaustedError:
            self._save()
            raise
        except KenpoError as error:
            if error.exit_status == 2 and self.state.step == 0 and not self.resumed and self.ranks.first:
                shutil.rmtree(self.folder.path, ignore_errors=True)
            if isinstance(error, NonFiniteError) and self.state.step:  # its own doing, not bad input
                raise RunError(f"step {self.state.step + 1}: {error}") from error
            raise
        finally:
            self._tell("on_end", summary)

    def _steps(self) -> None:
        steps = self.config.steps
        if self.state.step == 0 and self.parts.source.heldout and self.state.evals["before"] is None:
            began = time.perf_counter()
            figures = self._evaluate("before")
            if self.config.keep_best:
                check_figure(self.config.keep_best, figures)
            if self.parts.teacher is not None:
                outcome = self.parts.teacher.run()[0]
                figures["teacher/accuracy"] = {"sum": outcome.correct, "count": outcome.judged}
            line = {"step": 0, **figures, "time": {"eval": time.perf_counter() - began}}
            self._write("metrics.jsonl", [line])
            self._tell("on_eval", 0, line)
        while self.state.step < steps:
            self._step(self.state.step + 1)
            stop = max(self.ranks.gather(self.asked.number))
            every = self.config.checkpoint_every
            best = self.state.best.get("step") == self.state.step
            if stop or best or self.state.step == steps or (every and self.state.step % every == 0):
                self._save()
            if stop and self.state.step < steps:
                raise Interrupted(stop, self.folder.path, self.state.step)

    def _step(self, step: int) -> None:
        began = time.perf_counter()
        parts, state = self.parts, self.state
        collected = parts.source.next(step, state.source, *self._asks(step))
        try:
            done = parts.updater.update(collected.rollouts, state.algorithm, step, state.updates)
        except KenpoError:
            self._record(step, collected.rollouts)  # the batch that broke the update, to be looked at
            raise
        updates = state.updates + done.updates
        parts.engine.update(parts.updater.learner.weights, updates)
        figures = step_figures(step, collected, done)
        figures |= {f"schedule/{s.key}": s.value(step - 1) for s in self.config.moving}
        clock = figures.pop("time")
        every, last = self.config.eval_every, step == self.config.steps
        evaluated = bool(parts.source.heldout) and (last or bool(every and step % every == 0))
        if evaluated:
            at = time.perf_counter()
            figures |= self._evaluate("after")
            clock["eval"] = time.perf_counter() - at
            if self.config.keep_best:
                state.best = better(state.best, self.config.keep_best, figures, step) or state.best
        state.step, state.updates, state.source, state.algorithm = step, updates, collected.state, done.state
        for name, n in figures["tokens"].items():
            state.tokens[name] += n
        clock["step"] = time.perf_counter() - began
        figures["time"] = clock
        self._say(self.watch(done.rollouts, step))
        self._record(step, done.rollouts)
        self._write("samples.jsonl", collected.records[: self.config.log_samples])
        self._write("metrics.jsonl", [figures])
        self._tell("on_step", step, figures)
        if evaluated:
            self._tell("on_eval", step, figures)

    def _record(self, step: int, rollouts: Rollouts) -> None:
        if self.config.record_batches and self.ranks.first:
            self.folder.record_batch(step, rollouts, {"step": step, "algorithm": self.parts.algorithm.name})

    def _asks(self, step: int) -> tuple[Priorities | None, Usable | None]:
        """What the algorithm asks of the source: the problems' priorities, and which rollouts it will train on."""
        algorithm = self.parts.updater.at(step)
        priorities = algorithm.advantage.priorities(self.state.algorithm)
        return priorities, (lambda batch: kenpo.select(algorithm, batch)) if algorithm.selection else None

    def _evaluate(self, when: str) -> dict[str, Any]:
        figures = self.parts.source.measure(self.parts.updater.learner.terms)
        self.state.evals[when] = average(figures, self.parts.source.headline)
        return figures

    def _finish(self) -> dict[str, Any]:
        summary = {
            "steps": self.state.step,
            "eval": self.state.evals,
            "eval_figure": self.parts.source.headline,
            "seconds": self._seconds(),
            "peak_rss_bytes": peak_memory(),
            "tokens": self.state.tokens,
            "versions": versions(),
            **({"best": self.state.best} if self.state.best else {}),
        }
        if self.ranks.first:
            from kenpo.runs.curve import draw_curve

            with folders.disk_errors("curve.png"):
                draw_curve(self.folder.metrics(), self.folder.path / "curve.png", title=self.parts.algorithm.name)
            self.folder.write_summary(summary)
        return {**summary, "run": str(self.folder.path)}

    # -- small things ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if not self.ranks.first or self.saved_at == self.state.step:
            return
        self.state.seconds, self.state.engine = self._seconds(), self.parts.engine.state()
        learner = self.parts.updater.learner
        path = self.folder.save(
            self.state, self.parts.model, self.parts.tokenizer, learner.state(), learner.scorer.heads,
            self.parts.updater.further_part(),
        )  # fmt: skip
        self.saved_at = self.state.step
        self._tell("on_checkpoint", self.state.step, path)

    def _write(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        if self.ranks.first:
            self.folder.append(name, lines)

    def _say(self, lines: Iterable[str]) -> None:
        """Notes for the one who reads along."""
        for line in lines if self.ranks.first and not self.config.quiet else ():
            note(line)

    def _tell(self, what: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(*args)

    def _seconds(self) -> float:
        return self.base_seconds + time.perf_counter() - self.began
