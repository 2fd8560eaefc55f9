"""What a run looks like while it runs: a live panel on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kenpo.runs.callbacks import Callback, Described
from kenpo.runs.figures import average

_BARS = "▁▂▃▄▅▆▇█"


def make_progress(quiet: bool) -> list[Callback]:
    """The onlooker for this process's standard output, or none."""
    if quiet:
        return []
    return [Panel() if sys.stdout.isatty() else Lines()]


def sparkline(values: list[float]) -> str:
    """A row of bars from the smallest to the largest value; flat if all are equal.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(_BARS[int((v - low) / span * (len(_BARS) - 1) + 1e-9)] for v in values)


def number(value: float | None, form: str = ".3f") -> str:
    """A figure, or a dash for none."""
    return "–" if value is None else format(value, form)


def gradient(norm: float | None, clip: float) -> str:
    """The gradient's norm, and what it was cut to where it was.

    >>> gradient(22.2, 1.0), gradient(0.5, 1.0), gradient(3.0, 0.0)
    ('grad 22.200 cut to 1', 'grad 0.500', 'grad 3.000')
    """
    cut = norm is not None and 0 < clip < norm
    return f"grad {number(norm)}" + (f" cut to {clip:g}" if cut else "")


def rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the panel shows of one step."""

    def show(label: str, name: str, form: str = ".3f") -> str:
        return f"{label} {number(average(figures, name), form)}".strip()

    entropy = show("", "entropy") if "entropy" in figures else f"{show('', 'entropy_estimate')} (estimate)"
    clock, tokens = dict(figures.get("time", {})), figures.get("tokens", {})
    whole = clock.pop("step", 0.0) or 1e-9
    lines = {
        "reward": [show("", "reward"), show("correct", "correct"), show("without verdict", "no_verdict")],
        "entropy": [entropy, show("KL to sampler", "kl_sampler", ".2e"), show("sampler gap", "sampler_gap", ".1e")],
        "clipped": [
            show("high", "clip_high", ".4f"), show("low", "clip_low", ".4f"), show("gradient norm", "grad_norm"),
            show("lr", "lr", ".1e"),
        ],
        "length": [
            show("correct", "length_correct", ".1f"), show("wrong", "length_wrong", ".1f"),
            show("truncated", "truncated"),
        ],
        "groups": [show("kept", "groups_kept"), show("rounds", "rounds", "d")],
        "tokens/s": [f"{name} {count / whole:,.0f}" for name, count in tokens.items()],
        "time": [f"{whole:.2f} s", *(f"{name} {100 * part / whole:.0f}%" for name, part in clock.items())],
    }  # fmt: skip
    return [(name, "   ".join(parts)) for name, parts in lines.items()]


def listed(verifier: str | Sequence[str] | None) -> str:
    """The verifiers or data files of a run on one line."""
    return verifier if isinstance(verifier, str) else " + ".join(verifier or ())


class Lines(Callback):
    """One line per step, for logs and pipes."""

    def on_start(self, config: Described, path: Path, step: int) -> None:
        self.steps, self.clip = config.steps, config.grad_clip
        print(
            f"{config.algorithm} on {listed(config.task)} judged by {listed(config.verifier)}, model {config.model} "
            f"-> {path}" + (f", from step {step}" if step else ""),
            flush=True,
        )

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        get = lambda name: average(figures, name)  # noqa: E731
        clock, tokens = figures["time"], figures["tokens"]
        if "reward" not in figures:  # nothing was sampled
            print(
                f"step {step}/{self.steps}  loss {number(get('loss'), '.4f')}  length {number(get('length'), '.1f')}  "
                f"grad {number(get('grad_norm'))}  lr {figures['lr']:.1e}  tokens {tokens['trained']}  "
                f"{clock['step']:.2f} s",
                flush=True,
            )
            return
        print(
            f"step {step}/{self.steps}  reward {number(get('reward'))}  "
            f"entropy {number(get('entropy') or get('entropy_estimate'))}  "
            f"kl {number(get('kl_sampler'), '.1e')}  clip +{number(get('clip_high'))} -{number(get('clip_low'))}  "
            f"length {number(get('length'), '.1f')}  {gradient(get('grad_norm'), self.clip)}  "
            f"tokens {tokens['generated']}/{tokens['filtered']}/{tokens['trained']}  {clock['step']:.2f} s",
            flush=True,
        )

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        if (entry := figures.get("eval/accuracy")) is not None:
            print(
                f"step {step}  held-out accuracy {number(average(figures, 'eval/accuracy'))} "
                f"({entry['sum']} of {entry['count']})",
                flush=True,
            )
        if "eval/loss" in figures:
            of_pairs = "".join(
                f"  {name.replace('_', ' ')} {number(average(figures, f'eval/{name}'))}"
                for name in ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward", "kl")
                if f"eval/{name}" in figures
            )
            print(f"step {step}  held-out loss {number(average(figures, 'eval/loss'), '.4f')}{of_pairs}", flush=True)

    def on_checkpoint(self, step: int, path: Path) -> None:
        print(f"step {step}  saved {path}", flush=True)

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        if summary:
            print(closing(summary), flush=True)


def closing(summary: Mapping[str, Any]) -> str:
    """The last line of a finished run."""
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    name = str(summary.get("eval_figure", "eval/accuracy")).rpartition("/")[2]
    accuracy = f"held-out {name} {number(before)} -> {number(after)}, " if after is not None else ""
    return f"done: {accuracy}{summary['steps']} steps in {summary['seconds']:.0f} s"


class Panel(Callback):
    """A live panel: the current step's figures and the course of reward and held-out accuracy."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.accuracy: list[float] = []
        self.live: Any = None
        self.saved = ""

    def on_start(self, config: Described, path: Path, step: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.config, self.path, self.step, self.began, self.first = config, path, step, time.monotonic(), step
        self.figures: Mapping[str, Any] = {}
        self.console = Console()
        self.live = Live(self._view(), console=self.console, refresh_per_second=4)
        self.live.start()

    def on_step(self, step: int, figures: Mapping[str, Any]) -> None:
        self.step, self.figures = step, figures
        reward = average(figures, "reward")
        self.rewards += [] if reward is None else [reward]
        self.live.update(self._view())

    def on_eval(self, step: int, figures: Mapping[str, Any]) -> None:
        accuracy = average(figures, "eval/accuracy")
        self.accuracy += [] if accuracy is None else [accuracy]
        self.live.update(self._view())

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.saved = f"   saved step {step}"
        self.live.update(self._view())

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        if self.live is not None:
            self.live.stop()
        if summary:
            self.console.print(closing(summary), highlight=False)

    def _view(self) -> Any:
        from rich.panel import Panel as Box
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", justify="right")
        grid.add_column(overflow="fold")
        done, steps = self.step - self.first, self.config.steps or 0
        left = (time.monotonic() - self.began) / done * (steps - self.step) if done else None
        grid.add_row("step", f"{self.step} of {steps}   {number(left, '.0f')} s left{self.saved}")
        accuracy = f"{self.accuracy[-1]:.3f}  {sparkline(self.accuracy[-60:])}" if self.accuracy else "–"
        grid.add_row("held-out accuracy", accuracy)
        grid.add_row("reward so far", sparkline(self.rewards[-60:]) or "–")
        for name, text in rows(self.figures) if self.figures else []:
            grid.add_row(name, text)
        return Box(
            grid, title=f"{self.config.algorithm} on {listed(self.config.task)} → {self.path}", title_align="left"
        )
