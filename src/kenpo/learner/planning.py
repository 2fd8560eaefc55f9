"""Which model passes a step runs, and why: read off the algorithm's ``needs`` and ``two_phase``; there are no flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kenpo.stages.base import snake
from kenpo.types import Rollouts

EXACT_ENTROPY_VOCABULARY = 32768  # up to here the exact entropy is measured in passing; above, only if a stage needs it


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


def plan(
    algorithm: Any, updates: int, vocabulary: int, *, kept_reference: bool = False, partner: bool = False
) -> Passes:
    """Decide the passes for a batch that so many updates consume.

    ``kept_reference``: reference log-probs are kept on disk; ``partner``: another policy's minibatches come last.
    """
    needs = frozenset(algorithm.needs)
    wants_old = "logp_old" in needs
    early = "logp_old" in algorithm.prepare_needs
    listed = "topk_logp_old" in needs
    old = wants_old and (updates > 1 or early or partner or listed)
    if not wants_old:
        old_why = "no stage reads π_old"
    elif early:
        old_why = f"{who(algorithm, 'logp_old')} reads π_old before the first update"
    elif listed:
        old_why = f"{who(algorithm, 'topk_logp_old')} reads π_old on the likeliest tokens"
    elif old and updates == 1:
        old_why = "a partner's minibatches come after the policy's own"
    elif old:
        old_why = f"{updates} updates consume the batch and {who(algorithm, 'logp_old')} reads π_old"
    else:
        old_why = "one update consumes the batch, so π_old is π_θ itself"
    compared = sorted(needs & {"logp_ref", "kl_ref"})
    reference = bool(compared)
    readers = " and ".join(who(algorithm, name) for name in compared)
    reference_why = f"{readers} reads it" if reference else "no stage reads a reference policy"
    if kept_reference:
        reference, reference_why = False, f"{readers} reads it; scored once before step 1 and kept in the run's folder"
    needed = "entropy" in needs
    entropy = needed or (algorithm.uses_logp and vocabulary <= EXACT_ENTROPY_VOCABULARY)
    if needed:
        entropy_why = f"{who(algorithm, 'entropy')} reads it"
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


def who(algorithm: Any, name: str) -> str:
    """The stages that read a field, as messages name them."""
    return " and ".join(snake(s) for s in algorithm.stages if name in s.needs)
