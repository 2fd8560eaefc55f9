"""A moving average of a policy: a teacher that follows slowly enough not to chase itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.models.lora import ACTIVE, AVERAGE
from kenpo.models.scorer import Scorer

PROX_DECAY = 0.9  # ours
AVERAGED = "average."  # what its names begin with in a checkpoint


class Average:
    """``θ' ← (1 − rate)·θ' + rate·θ`` after each optimizer step, over the parameters that are trained.

    ``scorer`` reads with θ', which begins as the policy is when this is made. With an adapter θ' is a second adapter in
    the same model; else a second model. Sums are kept in float32 beside a model of lower precision: its own would lose
    steps this small. Source: SDPO, arXiv:2601.20802 (rate .05).
    """

    def __init__(self, policy: Scorer, rate: float) -> None:
        self.rate = rate
        self.scorer = policy.averaged()
        theirs = dict(self.scorer.model.named_parameters())
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {
            n: (p, theirs[n.replace(f".{ACTIVE}.", f".{AVERAGE}.") if self.scorer.chosen else n])
            for n, p in policy.model.named_parameters()
            if p.requires_grad
        }
        self.sums = {n: q.detach() if q.dtype.itemsize >= 4 else q.detach().float() for n, (_, q) in self.pairs.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """One step towards the policy."""
        for name, (p, q) in self.pairs.items():
            total = self.sums[name].lerp_(p.detach().to(self.sums[name].dtype), self.rate)
            if total.data_ptr() != q.data_ptr():
                q.copy_(total)

    def state(self) -> dict[str, Tensor]:
        """The average by parameter name."""
        return {AVERAGED + n: t.detach().cpu().clone() for n, t in self.sums.items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for name, (_, q) in self.pairs.items():
            self.sums[name].copy_(tensors[AVERAGED + name])
            q.copy_(self.sums[name])


def check_decay(decay: float | None, algorithm: Any) -> None:
    """InputError for a decay of an average that no stage reads."""
    if decay is not None and "logp_prox" not in algorithm.needs:
        raise InputError(f"--prox-decay: no stage of {algorithm.name!r} reads an averaged policy; leave it out")


def proximal_average(decay: float | None, algorithm: Any, scorer: Scorer) -> Average | None:
    """The average of the policy's weights that is the algorithm's proximal policy; None where it reads none."""
    if "logp_prox" not in algorithm.needs:
        return None
    return Average(scorer, 1.0 - (PROX_DECAY if decay is None else decay))


def sampling_snapshot(algorithm: Any, scorer: Scorer, average: Average | None) -> Average | None:
    """The policy as it was before each batch, which ``kl_sampler`` compares with; None where it is not read."""
    if "kl_sampler" not in algorithm.needs:
        return None
    if average is not None:
        raise InputError(
            f"{algorithm.name!r}: reads a copy of the sampler's weights, for which a moving average leaves no room"
        )
    snapshot = Average(scorer, 1.0)
    scorer.sampler = snapshot.scorer
    return snapshot
