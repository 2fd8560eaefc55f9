"""What an algorithm says of held-out pairs: its loss, and how well its scores tell the better response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import kenpo
from kenpo.ops import divergences, masked
from kenpo.types import Policy, Rollouts

#: Figures of pairs (`PairLogistic.figures`) that are measured on held-out pairs too.
FIGURES = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")


def pair_figures(algorithm: Any) -> Callable[[Rollouts, Policy], Mapping[str, tuple[float, float]]]:
    """(rollouts, policy) -> sums and counts of the loss, the figures of pairs, and ``kl``.

    The loss is the mean over groups with a decided pair. ``kl`` is the mean over response tokens of ½(log π/π_ref)²
    (k2), in nats: a distance along these responses, which were not sampled from π; of samples it is KL to second order.
    Nothing has a gradient.
    """

    @torch.no_grad()
    def figures(rollouts: Rollouts, policy: Policy) -> dict[str, tuple[float, float]]:
        here = next(iter(policy.tensors().values())).device
        batch = kenpo.weigh(algorithm, kenpo.prepare(algorithm, rollouts).to(here), policy)
        loss = kenpo.objective(algorithm, batch, policy)
        pairs = float(batch.totals.contrasts)
        found = {"loss": (float(loss.loss) * pairs, pairs)}
        found |= {n: (float(loss.sums[n][0]), float(loss.sums[n][1])) for n in FIGURES if n in loss.sums}
        if policy.logp is not None and rollouts.logp_ref is not None:
            mask = rollouts.mask.to(here)
            distance = divergences.k2(masked.select(policy.logp - rollouts.logp_ref.to(here), mask))
            found["kl"] = (float(masked.select(distance, mask).sum()), float(mask.sum()))
        return found

    return figures
