"""What a step will do and why: which model passes run, how the batch is cut, how much memory that may take.

Everything is read off the algorithm's ``needs`` and ``two_phase``; there are no flags for passes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from kenpo.errors import InputError
from kenpo.experience.corpus import check_corpus
from kenpo.learner import critic
from kenpo.learner.critic import VALUED
from kenpo.learner.idle import why_none_is_idle
from kenpo.learner.learner import couples_tokens
from kenpo.models.backward import head_chunk
from kenpo.models.head import FEW_LOGITS
from kenpo.models.scorer import Scorer
from kenpo.models.shared_prompt import LEAST_SHARE
from kenpo.options import listed
from kenpo.stages.base import Scope, snake
from kenpo.trainer.config import RunConfig, to_dict
from kenpo.trainer.mixing import MIXED, check_mixing
from kenpo.trainer.pairing import keeps_reference, supplied_by
from kenpo.trainer.sampling import check_sampling
from kenpo.trainer.teaching import TAUGHT, check_teacher
from kenpo.types import Rollouts

ONE_PHASE = "every weight can be made inside its own microbatch"
EXACT_ENTROPY_VOCABULARY = 32768  # up to here the exact entropy is measured in passing; above, only if a stage needs it
SUPPLIED = frozenset(
    {
        "hinted",
        "mask",
        "group",
        "rewards",
        "tokens",
        "prompt_id",
        "answer",
        "logp_sampler",
        "logp_old",
        "logp_ref",
        "policy_version",
        "baseline",
        "prefix",
        "truncated",
        "support_ids",
        "logp",
        "entropy",
        "kl_ref",
    }
)


@dataclass(frozen=True)
class Passes:
    """Which model passes a step runs. The texts say why, or why not."""

    updates: int
    old: bool
    old_why: str
    reference: bool
    reference_why: str
    two_phase: str | None
    whole_groups: str | None  # why microbatches hold whole groups; None: any rows will do
    entropy: bool
    entropy_why: str


def plan_passes(algorithm: Any, config: RunConfig, vocabulary: int) -> Passes:
    """Decide the passes. InputError for a stage that needs a field this trainer does not supply."""
    needs = frozenset(algorithm.needs)
    check_teacher(algorithm, config)
    check_sampling(config)
    critic.check(algorithm, config.critic, config.critic_lr, config.critic_warmup, config.steps)
    check_mixing(algorithm, config)
    check_corpus(algorithm, config.corpus, config.corpus_rows, config.source)
    for name in sorted(needs - SUPPLIED - TAUGHT - VALUED - MIXED - supplied_by(config)):
        raise InputError(
            f"algorithm {algorithm.name!r} reads {name!r} ({_who(algorithm, name)}), which `kenpo train` does not "
            "supply; put it into kenpo.Rollouts or kenpo.Policy in a loop of your own"
        )
    updates = config.minibatches * config.epochs
    if algorithm.updates is not None and updates > algorithm.updates:
        raise InputError(
            f"algorithm {algorithm.name!r} takes at most {algorithm.updates} update(s) per rollout batch, but "
            f"--minibatches {config.minibatches} --epochs {config.epochs} make {updates}"
        )
    wants_old = "logp_old" in needs
    early = "logp_old" in algorithm.prepare_needs
    old = wants_old and (updates > 1 or early or config.partner is not None)
    if not wants_old:
        old_why = "no stage reads π_old"
    elif early:
        old_why = f"{_who(algorithm, 'logp_old')} reads π_old before the first update"
    elif old and updates == 1:
        old_why = "a partner's minibatches come after the policy's own"
    elif old:
        old_why = f"{updates} updates consume the batch and {_who(algorithm, 'logp_old')} reads π_old"
    else:
        old_why = "one update consumes the batch, so π_old is π_θ itself"
    compared = sorted(needs & {"logp_ref", "kl_ref"})
    reference = bool(compared)
    readers = " and ".join(_who(algorithm, name) for name in compared)
    reference_why = f"{readers} reads it" if reference else "no stage reads a reference policy"
    if keeps_reference(config, needs):
        reference, reference_why = False, f"{readers} reads it; scored once before step 1 and kept in the run's folder"
    needed = "entropy" in needs
    entropy = needed or (algorithm.uses_logp and vocabulary <= EXACT_ENTROPY_VOCABULARY)
    if needed:
        entropy_why = f"{_who(algorithm, 'entropy')} reads it"
    elif not algorithm.uses_logp:
        entropy_why = "no stage reads log-probs"
    elif entropy:
        entropy_why = f"for the metrics: cheap at a vocabulary of {vocabulary:,}"
    else:
        entropy_why = f"no stage reads it and the vocabulary holds {vocabulary:,}: estimated from the samples instead"
    two, groups = _phases(algorithm, old)
    return Passes(updates, old, old_why, reference, reference_why, two, groups, entropy, entropy_why)


def _phases(algorithm: Any, old: bool) -> tuple[str | None, str | None]:
    """`Algorithm.two_phase` and `whole_groups` asked with a batch that has, or lacks, logp_old."""
    zeros = torch.zeros(1, 2)
    probe = Rollouts(
        mask=torch.zeros(1, 2, dtype=torch.bool), group=torch.zeros(1, dtype=torch.int64), rewards=torch.zeros(1)
    )
    probe = probe.replace(logp_old=zeros) if old else probe
    return algorithm.two_phase(probe, whole_groups=True), algorithm.whole_groups(probe)


def _who(algorithm: Any, name: str) -> str:
    return " and ".join(snake(s) for s in algorithm.stages if name in s.needs)


def check_group_size(algorithm: Any, config: RunConfig) -> None:
    """InputError for groups of one under an advantage, selection or shaping that compares the members of a group."""
    if config.group_size != 1:
        return
    for stage in (algorithm.advantage, *algorithm.selection, *algorithm.shaping):
        if stage.span == Scope.GROUP:
            raise InputError(
                f"--group-size 1: {snake(stage)} of {algorithm.name!r} compares the samples of a group, "
                "and a group of one has nothing to compare; use at least 2, or an algorithm with another advantage"
            )


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that the memory estimate needs."""

    parameters: int
    bytes_each: int
    layers: int
    hidden: int
    vocabulary: int
    kv_width: int
    chunk: int | None  # positions that a fused head takes at a time; None: its logits are made whole
    trainable: int  # parameters
    unshared: str | None  # why prompts can't be shared in training; None: they can
    context: int | None  # tokens that the model takes, where it names a limit
    padded: str | None  # why rows are padded; None: they are packed
    critic: int = 0  # bytes of a critic's own model

    @classmethod
    def of(cls, scorer: Scorer) -> ModelFacts:
        """Read them off a loaded model."""
        model = scorer.model
        c = model.config.get_text_config(decoder=True)
        heads = getattr(c, "num_attention_heads", None) or 1
        hidden = getattr(c, "hidden_size", None) or 1
        width = (getattr(c, "head_dim", None) or hidden // heads) * (getattr(c, "num_key_value_heads", None) or heads)
        parameters = list(model.parameters())
        return cls(
            sum(p.numel() for p in parameters), parameters[0].element_size(),
            getattr(c, "num_hidden_layers", None) or 1, hidden,
            int(model.get_input_embeddings().weight.shape[0]), width, head_chunk(scorer.head),
            sum(p.numel() for p in parameters if p.requires_grad), scorer.why_unshared(),
            scorer.context, scorer.padded,
        )  # fmt: skip


#: Bytes of one moment, where it is not held in the parameter's own precision.
MOMENT_BYTES = {
    "torchao_adamw_8bit": 1.0,
    "torchao_adamw_4bit": 0.5,
    "bnb_adamw_8bit": 1.0,
    "bnb_paged_adamw_8bit": 1.0,
}


def phases(config: RunConfig, passes: Passes) -> str:
    """Why a step takes one phase or two."""
    if passes.whole_groups:
        return (
            f"microbatches hold whole groups ({passes.whole_groups}); "
            f"with a group of more than {config.microbatch_tokens:,} tokens: yes"
        )
    return passes.two_phase or ONE_PHASE


def head_path(config: RunConfig, algorithm: Any, passes: Passes, facts: ModelFacts) -> str:
    """How log-probs and their gradients come about, and why."""
    if facts.chunk is None:
        return "whole logits: the head is not a bare Linear, or the model's own logits differ from it"
    if config.top_k or config.top_p < 1:
        return "whole logits: they are restricted to what top-k and top-p sampling kept"
    if config.microbatch_tokens * facts.vocabulary <= FEW_LOGITS:
        return f"whole logits: {config.microbatch_tokens:,} positions of {facts.vocabulary:,} are few"
    fused = f"fused, {facts.chunk:,} positions at a time"
    if passes.two_phase:
        return f"{fused}, in the second phase: four matrix products in all"
    if "kl_ref" in algorithm.needs:
        return "a tile of the vocabulary at a time, made again in the backward pass: four matrix products (kl_ref)"
    coupled = couples_tokens(algorithm, not passes.old)
    if coupled:
        return f"{fused}: three matrix products, four for longer responses ({coupled} couples their tokens)"
    return f"{fused}: three matrix products"


def backward_path(algorithm: Any, passes: Passes) -> str:
    """Which rollouts run a backward pass, and why."""
    if passes.two_phase:
        return "rollouts with a coefficient other than 0; the rest is left out of the second phase"
    why = why_none_is_idle(algorithm)
    return f"every rollout: {why}" if why else "groups with an advantage other than 0; the rest is only measured"


def prompt_path(config: RunConfig, facts: ModelFacts) -> str:
    """Whether a group's prompt runs once in scoring and training, and why not."""
    if facts.unshared:
        return f"no   {facts.unshared}"
    if config.group_size == 1:
        return "no   a group holds one sample"
    return f"yes  where that saves {LEAST_SHARE:.0%} of a group's tokens, in scoring and training"


def memory_estimate(config: RunConfig, passes: Passes, facts: ModelFacts) -> dict[str, int]:
    """Bytes by purpose; rough (activations at about 34 numbers per hidden unit and layer), on one process."""
    n, each, moved = facts.parameters, facts.bytes_each, facts.trainable
    adapted = moved < n
    full = max(each, 4)
    master = 4 * moved if each < 4 and not adapted else 0
    rows = config.microbatch_tokens
    at_once = rows if facts.chunk is None or rows * facts.vocabulary <= FEW_LOGITS else min(rows, facts.chunk)
    held = min(config.prompts * config.group_size * config.max_tokens, config.sampling_tokens or sys.maxsize)
    return {
        "weights": n * each,
        "gradients": moved * each + master,
        "optimizer": round(MOMENT_BYTES.get(config.optimizer, full) * 2 * moved) + master,
        "reference": n * each if passes.reference and not adapted else 0,
        "critic": facts.critic,
        "key-value cache while sampling": 2 * facts.layers * facts.kv_width * each * held,
        "activations of a microbatch": rows
        * facts.hidden
        * each
        * (facts.layers + 17 if config.gradient_checkpointing else 17 * facts.layers),
        "logits of a microbatch": (4 if passes.entropy else 3) * at_once * facts.vocabulary * full,
    }


def checkpoint_room(config: RunConfig, passes: Passes, facts: ModelFacts) -> tuple[int, int]:
    """How many checkpoints lie on the disk at once at most, and the bytes of one: weights, moments, masters."""
    every = config.checkpoint_every or config.steps
    number = -(-config.steps // every)
    weights = (facts.trainable if config.save_adapter else facts.parameters) * facts.bytes_each
    moments = memory_estimate(config, passes, facts)["optimizer"]
    return min(number, config.keep + 1) if config.keep else number, weights + moments


def acting(algorithm: Any, config: RunConfig) -> list[str]:
    """The plan's lines on parts that can't act and on biased updates; none where all can act."""
    from kenpo.trainer.acting import notes

    found = notes(algorithm, config)
    return ["what to know of this configuration", *(f"  {line}" for line in found), ""] if found else []


def report(
    config: RunConfig, algorithm: Any, passes: Passes, facts: ModelFacts, ranks: int = 1, heldout: int | None = None
) -> str:
    """The plan as text: resolved configuration, passes, arithmetic, memory. ``heldout``: problems that there are."""
    samples = config.prompts * config.group_size
    held = config.eval_problems if heldout is None else heldout
    capped = config.but(microbatch_tokens=min(config.microbatch_tokens, samples * (config.max_tokens + 32)))
    yes = {True: "yes", False: "no"}
    lines = [
        f"{algorithm.name} on {listed(config.task)}, model {config.model} "
        f"({facts.parameters:,} parameters, "
        + (f"{facts.trainable:,} of them trained, " if facts.trainable < facts.parameters else "")
        + f"{config.dtype}, {config.device})",
        "",
        "settings of the algorithm",
        *(f"  {key} = {value}" for key, value in algorithm.settings().items()),
        "",
        *acting(algorithm, config),
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
        f"  two phases       {yes[passes.two_phase is not None]:<4} {phases(config, passes)}",
        f"  exact entropy    {yes[passes.entropy]:<4} {passes.entropy_why}",
        f"  shared prompts   {prompt_path(config, facts)}",
        f"  padding          {f'yes  {facts.padded}' if facts.padded else 'no   rows lie end to end'}",
        f"  head                  {head_path(capped, algorithm, passes, facts)}",
        f"  backward              {backward_path(algorithm, passes)}",
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
    sizes = memory_estimate(capped, passes, facts)
    lines += [f"  {_bytes(size):>10}  {what}" for what, size in sizes.items() if size]
    lines += [f"  {_bytes(sum(sizes.values())):>10}  together", "", "configuration"]
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
        f"  judge            yes  {verifier_path(config)}",
    ]


def verifier_path(config: RunConfig) -> str:
    """The verifiers, and what those that run in processes of their own may take."""
    given = config.verifier
    items = [given] if isinstance(given, str) else given or ()
    if all(name.partition("=")[0] in ("exact", "numeric", "gsm8k") for name in items):
        return " + ".join(items)
    memory = f"{_bytes(config.verifier_memory)} of address space" if config.verifier_memory else "no limit on memory"
    box = "under bubblewrap" if config.sandbox else "no sandbox"
    return (
        f"{' + '.join(items)}: {config.verifier_workers} process(es), {config.time_limit:g} s a call, {memory}, {box}"
    )


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""
