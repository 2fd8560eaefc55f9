"""What joins the policy's groups in a run, and under which algorithms it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kenpo.errors import InputError
from kenpo.experience.corpus import reads_authors
from kenpo.experience.experts import Experts, Traces
from kenpo.experience.mixture import Mixture
from kenpo.experience.problem import Problem
from kenpo.experience.prompts import Prompts
from kenpo.experience.verdict import Verifier
from kenpo.trainer.config import TrainConfig

MIXED = frozenset({"origin"})


def check_experts(algorithm: Any, config: TrainConfig) -> None:
    """InputError for expert traces under an algorithm that would take them for the policy's own."""
    if reads_authors(algorithm):
        return
    for option, given in (("--expert", config.expert), ("--expert-rows", config.expert_rows > 1)):
        if given:
            raise InputError(
                f"{option}: no stage of {algorithm.name!r} reads who wrote a response, so an expert's would count as "
                "the policy's own; use luffy, grin or sft_mixture, or leave it out"
            )


def mixture_of(
    config: TrainConfig, algorithm: Any, prompts: Prompts, verifier: Verifier, ends: frozenset[int],
    problems: Sequence[Problem],
) -> Mixture | None:  # fmt: skip
    """What joins the groups, checked on the problems within reach; None: nothing. `ends`: ids that end a response."""
    if not reads_authors(algorithm):
        return None
    traces = Traces(config.expert, config.prompt_column)
    known = "logp_sampler" in algorithm.needs
    experts = Experts(traces, prompts, verifier, ends, config.expert_rows, config.seed, known)
    experts.check(problems)
    return experts
