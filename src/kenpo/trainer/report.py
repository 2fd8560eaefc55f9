"""The plan of a run as text (`--dry-run`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kenpo.experience.verifiers import told_of
from kenpo.learner import critic, telling
from kenpo.learner.memory import ModelFacts, memory_estimate
from kenpo.learner.planning import Passes
from kenpo.options import listed
from kenpo.stages.base import snake
from kenpo.terminal import bytes_of
from kenpo.trainer.config import RunConfig, to_dict
from kenpo.trainer.plan import load_of, notes


def report(
    config: RunConfig, algorithm: Any, passes: Passes, facts: ModelFacts, ranks: int = 1, heldout: int | None = None
) -> str:
    """The plan as text: resolved configuration, passes, arithmetic, memory. ``heldout``: problems that there are."""
    samples = config.prompts * config.group_size
    held = config.eval_problems if heldout is None else heldout
    at_once = min(config.microbatch_tokens, samples * (config.max_tokens + 32))
    restricted = bool(config.top_k) or config.top_p < 1
    said = notes(algorithm, config)
    yes = {True: "yes", False: "no"}
    lines = [
        f"{algorithm.name} on {listed(config.task)}, model {config.model} "
        f"({facts.parameters:,} parameters, "
        + (f"{facts.trainable:,} of them trained, " if facts.trainable < facts.parameters else "")
        + f"{config.dtype}, {config.device})",
        "",
        "settings of the algorithm",
        *(f"  {key} = {value}" for key, value in algorithm.settings().items()),
        *(f"  {s.key} moves from {s.start:g} to {s.end:g} over {s.steps} steps" for s in config.moving),
        "",
        *(["what to know of this configuration", *(f"  {line}" for line in said), ""] if said else []),
        "passes of one step",
        *source_path(config, facts),
        f"  refill           {yes[bool(algorithm.selection)]:<4} "
        + (
            f"up to {config.max_refills} rounds: {', '.join(map(snake, algorithm.selection))}"
            if algorithm.selection
            else "no selection"
        ),
        f"  old log-probs    {yes[passes.old]:<4} {passes.old_why}",
        f"  reference        {yes[passes.reference]:<4} {passes.reference_why}",
        f"  values           {critic.path(algorithm, config.critic, config.critic_warmup)}",
        f"  two phases       {yes[passes.two_phase is not None]:<4} {telling.phases(config.microbatch_tokens, passes)}",
        f"  exact entropy    {yes[passes.entropy]:<4} {passes.entropy_why}",
        f"  shared prompts   {telling.prompt_path(config.group_size, facts)}",
        f"  padding          {f'yes  {facts.padded}' if facts.padded else 'no   rows lie end to end'}",
        f"  head                  {telling.head_path(at_once, restricted, algorithm, passes, facts)}",
        f"  backward              {telling.backward_path(algorithm, passes)}",
        "",
        "arithmetic",
        f"  {samples} samples a step in {config.minibatches} minibatch(es) of about {samples // config.minibatches}, "
        f"{config.epochs} epoch(s): {passes.updates} optimizer step(s)",
        f"  microbatches of at most {config.microbatch_tokens:,} {'padded ' if facts.padded else ''}tokens "
        f"(a shared prompt counts once) on {ranks} process(es)",
        f"  {config.steps} steps: {config.steps * samples:,} samples, "
        f"at most {config.steps * samples * config.max_tokens:,} tokens"
        + (" before refilling" if algorithm.selection else ""),
        f"  held-out: {held} problems before, every {config.eval_every} steps, and after",
        "",
        "memory of a process, an estimate (prompts of 32 tokens; a microbatch never holds more than the batch)",
    ]
    sizes = memory_estimate(replace(load_of(config, passes), microbatch_tokens=at_once), facts)
    lines += [f"  {bytes_of(size):>10}  {what}" for what, size in sizes.items() if size]
    lines += [f"  {bytes_of(sum(sizes.values())):>10}  together", "", "configuration"]
    lines += [f"  {key} = {value}" for key, value in to_dict(config).items()]
    return "\n".join(lines)


def source_path(config: RunConfig, facts: ModelFacts) -> list[str]:
    """Where a batch comes from."""
    if config.source != "on_policy":
        return [f"  read             yes  {config.prompts} rows a step of {listed(config.task)}, as {config.source}"]
    whole = f", {facts.context:,} with the prompt" if facts.context else ""
    return [
        f"  sample           yes  {config.prompts} prompts x {config.group_size} samples, "
        f"up to {config.max_tokens} tokens each{whole}"
        + (f", {config.sampling_tokens:,} tokens at once" if config.sampling_tokens else ""),
        f"  judge            yes  {told_of(config)}",
    ]
