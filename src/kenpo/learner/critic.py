"""What predicts values beside a policy: a scalar head on the policy's trunk, or a model of its own."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from kenpo.errors import InputError
from kenpo.learner.learner import Learner
from kenpo.models.scorer import Scorer
from kenpo.models.terms import OF_THE_VOCABULARY
from kenpo.models.value_head import ScalarHead, ScalarHeads
from kenpo.ops import masked
from kenpo.types import Prepared, Rollouts

TRUNK, COPY = "trunk", "copy"  # a head on the policy, a model of its own that begins as the policy does
FOLDER = "critic"  # of a critic with a model of its own, inside a checkpoint
#: The fields that a critic fills or learns.
VALUED = frozenset({"values", "values_old", "score_old"})
RATE = 10.0  # a critic's learning rate as a multiple of the policy's, where none is named: it starts from nothing
PARTS = 4  # of a response, for figures by position


def check(
    algorithm: Any, critic: str | None = None, rate: float | None = None, warmup: int = 0, steps: int | None = None
) -> None:
    """InputError for a critic that nothing reads, that never learns, or that can't be apart from the policy."""
    name, own = algorithm.name, critic not in (None, TRUNK)
    given = [f"{o} {x}" for o, x in (("--critic-lr", rate), ("--critic-warmup", warmup or None)) if x is not None]
    if not algorithm.needs & VALUED:
        if "score" in algorithm.needs:  # its head has a rate too
            given = [g for g in given if not g.startswith("--critic-lr")]
        for option in ([f"--critic {critic}"] if critic is not None else []) + given:
            raise InputError(f"{option}: no stage of {name!r} reads values; leave it out")
        return
    if "values" not in algorithm.reaches:
        if not own:
            raise InputError(
                f"algorithm {name!r} reads a critic that never learns, and a head on the policy's trunk would move "
                "with it; name a trained one: --critic FOLDER (critic/ in a checkpoint of a run with --critic MODEL)"
            )
        for option in given:
            raise InputError(f"{option}: the critic of {name!r} never learns; leave it out")
    if own and (crossing := algorithm.crosses(OF_THE_VOCABULARY, {"values"})):
        raise InputError(f"--critic {critic}: {crossing}; use --critic trunk")
    if steps is not None and warmup >= steps:
        raise InputError(f"--critic-warmup {warmup}: the run has {steps} step(s), so the policy would never learn")


def named(critic: str | None) -> bool:
    """Whether `critic` is the path or hub name of a model."""
    return critic not in (None, TRUNK, COPY)


def path(algorithm: Any, critic: str | None, warmup: int) -> str:
    """Who predicts values in a run, for its plan."""
    if not algorithm.needs & VALUED:
        return "no   no stage reads values"
    where = "a head on the policy's trunk" if critic in (None, TRUNK) else f"a model of its own: {critic}"
    alone = f", which learns alone in the first {warmup} step(s)" if warmup else ""
    return f"yes  {where}{alone}; asked before the update"


def cost(critic: Critic | None) -> int:
    """Bytes of a critic's own model: its weights, and while it learns their gradients and two moments; rough."""
    if critic is None or critic.scorer is critic.policy.scorer:
        return 0
    parameters = list(critic.scorer.model.parameters())
    held = sum(p.numel() * p.element_size() for p in parameters)
    masters = sum(m.numel() * m.element_size() for m in critic.own.optimizer.masters.values()) if critic.own else 0
    moved = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad) if critic.own else 0
    return held + moved + (4 * masters if masters else 2 * moved)


def only_values(heads: ScalarHeads | None) -> ScalarHeads | None:
    """The head that makes values among `heads`, or None."""
    return (
        ScalarHeads({"values": cast(ScalarHead, heads["values"])}) if heads is not None and "values" in heads else None
    )


@dataclass(frozen=True)
class Rates:
    """Learning rates of one update; a policy without one rests."""

    policy: float | None
    critic: float | None = None


class Critic:
    """The critic of a run. `own` is the learner of a model of its own, or None: the head on the policy's trunk.

    A frozen critic is a scorer without a learner. A ``fresh`` head says 0 everywhere and begins, before the first
    batch, at that batch's mean reward: the critic then learns what differs and not, for many steps, the mean. A value
    loss sends its gradient to the model that makes the values and to no other: with a model of its own, the policy's
    gradient is that without the value loss.
    """

    def __init__(
        self, policy: Learner, own: Learner | None = None, frozen: Scorer | None = None, fresh: bool = False
    ) -> None:
        self.policy, self.own, self.fresh = policy, own, fresh
        self.scorer = frozen or (policy if own is None else own).scorer

    def look(
        self, needs: frozenset[str], rollouts: Rollouts, prompts: Sequence[int], seconds: dict[str, float]
    ) -> Rollouts:
        """`rollouts` with ``values_old`` [B,T], V before each trainable token, and with ``score_old`` [B], V after the
        last one (0 for a row without tokens), as far as they are in `needs`."""
        fields = {"values_old": "values", "score_old": "score"}
        want = frozenset(term for name, term in fields.items() if name in needs)
        if not want:
            return rollouts
        began = time.perf_counter()
        if self.fresh:
            self._begin(rollouts)
        terms = self.policy.terms(rollouts, want, prompts, self._ahead()).tensors()
        seconds["values"] = time.perf_counter() - began
        found = {name: terms[term].to(rollouts.mask.device) for name, term in fields.items() if term in want}
        return rollouts.replace(**found)

    @torch.no_grad()
    def _begin(self, rollouts: Rollouts) -> None:
        """Put the head at the mean of the rewards; rows without one (no verdict, supervised) say nothing."""
        known = rollouts.rewards[rollouts.rewards.isfinite() & ~rollouts.supervised]
        head = cast(ScalarHead, self.scorer.heads["values"])
        if len(known):
            head.bias.fill_(float(known.double().mean()))
        self.fresh = False

    def _ahead(self) -> Scorer:
        """The scorer whose score is the value after a row's last token: the same head on that token's state."""
        twin = copy.copy(self.scorer)
        head = cast(ScalarHead, self.scorer.heads["values"])
        twin.heads = ScalarHeads({"values": head, "score": head})
        return twin


def figures(prepared: Prepared) -> dict[str, tuple[float, float]]:
    """What the critic said before the update beside what came, as (sum, count); {} without returns.

    ``explained_variance``, and the means of ``returns`` and ``values`` in the first to the last quarter of a response's
    trainable tokens (a response of fewer than four leaves quarters out).
    """
    rollouts, returns = prepared.rollouts, prepared.returns
    if returns is None or rollouts.values_old is None:
        return {}
    where = rollouts.mask & prepared.compared.unsqueeze(1)
    found = {"explained_variance": (explained(prepared), 1.0)}
    place = where.cumsum(1) - 1
    quarter = masked.divide(PARTS * place, where.sum(1, keepdim=True)).floor()
    for part in range(PARTS):
        here = where & (quarter == part)
        count = float(here.sum())
        for name, x in (("returns", returns), ("values", rollouts.values_old)):
            found[f"{name}/{part + 1}of{PARTS}"] = (float(x[here].double().sum()), count)
    return found


def explained(prepared: Prepared) -> float:
    """``1 − Var(R − V) / Var(R)`` over the trained tokens: 1 for a critic that knows every return, 0 for one that says
    the same everywhere, below 0 for one that misleads. 0 where all returns are alike."""
    rollouts, returns = prepared.rollouts, prepared.returns
    assert returns is not None
    assert rollouts.values_old is not None
    where = rollouts.mask & prepared.compared.unsqueeze(1)
    if int(where.sum()) < 2:
        return 0.0
    spread = float(returns[where].var())
    return 1.0 - float((returns - rollouts.values_old)[where].var()) / spread if spread > 0 else 0.0
