"""What joins the policy's groups in a run, what its samples are shown, and under which algorithms that may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kenpo.engines.base import Engine, SamplingOptions
from kenpo.errors import InputError
from kenpo.experience.corpus import reads_authors
from kenpo.experience.experts import Experts, Traces
from kenpo.experience.guided import Guide
from kenpo.experience.hints import Hints
from kenpo.experience.mixture import Mixture
from kenpo.experience.options import ExperienceOptions
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.rephrase import ANSWER, EXPLAIN, Rephrase, RephraseOptions
from kenpo.experience.tasks import Task
from kenpo.experience.verdict import Verifier

MIXED = frozenset({"origin", "logp_guided", "logp_source"})
_REPHRASE = {"rephrase_explain": None, "rephrase_answer": None, "rephrase_below": 0.5, "rephrase_share": 0.75,
             "rephrase_buffer": 0}  # fmt: skip
_GUIDED = {"guided_rows": None, "guided_share": 1.0}


def check_mixing(algorithm: Any, config: ExperienceOptions) -> None:
    """InputError for an option on experts, restatements or guides that would have no effect, or the wrong one."""
    name, own = algorithm.name, not reads_authors(algorithm)
    if config.rephrase and config.expert_rows > 1:
        raise InputError("--expert-rows: with --rephrase no trace joins a group, one is restated; leave it out")
    for option, given in (("--expert", config.expert), ("--expert-rows", config.expert_rows > 1)):
        if given and own and not config.rephrase:
            raise InputError(
                f"{option}: no stage of {name!r} reads who wrote a response, so an expert's would count as the "
                "policy's own; use luffy, grin or sft_mixture, or have it restated with --rephrase"
            )
    for defaults, used, reader in (
        (_REPHRASE, config.rephrase, "belongs to --rephrase"),
        (_GUIDED, "logp_guided" in algorithm.needs, f"no stage of {name!r} corrects for a privileged prompt"),
    ):
        for field, default in defaults.items():
            if not used and getattr(config, field) != default:
                raise InputError(f"--{field.replace('_', '-')}: {reader}; leave it out")
    if config.guided_rows is not None and config.group_size and config.guided_rows > config.group_size:
        raise InputError(f"--guided-rows {config.guided_rows} exceeds --group-size {config.group_size}")


def mixture_of(
    config: ExperienceOptions, algorithm: Any, prompts: Prompts, verifier: Verifier, ends: frozenset[int], task: Task,
    engine: Engine, sampling: SamplingOptions, problems: Sequence[Problem],
) -> Mixture | None:  # fmt: skip
    """What joins the groups, checked on the problems within reach; None: nothing. `ends`: ids that end a response."""
    if not config.rephrase and not reads_authors(algorithm):
        return None
    known = "logp_sampler" in algorithm.needs and not config.rephrase
    traces = Traces(config.expert, config.prompt_column)
    experts = Experts(traces, prompts, verifier, ends, config.expert_rows, config.seed, known)
    made: Experts | Rephrase = experts
    if config.rephrase:
        made = Rephrase(experts, engine, sampling, rephrase_options(config, task), config.seed)
    made.check(problems)
    return made


def rephrase_options(config: ExperienceOptions, task: Task) -> RephraseOptions:
    """How traces are restated: templates that are named, else the task's own, else English ones."""
    explain, answer = getattr(task, "rephrase_templates", (EXPLAIN, ANSWER))
    return RephraseOptions(
        config.rephrase_explain or explain, config.rephrase_answer or answer, config.rephrase_below,
        config.rephrase_share, config.rephrase_buffer,
    )  # fmt: skip


def guide_of(config: ExperienceOptions, algorithm: Any, hints: Hints, problems: Sequence[Problem]) -> Guide | None:
    """What the samples are shown beside the problem, checked on the problems within reach; None: nothing."""
    if "logp_guided" not in algorithm.needs:
        return None
    guide = Guide(hints, config.guided_rows, config.guided_share)
    guide.check(problems)
    return guide
