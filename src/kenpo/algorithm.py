"""An algorithm is a frozen record of stages, with what follows from them: needs, scope, phases, variations.

The order in which the stages run is in `kenpo.order`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kenpo import order
from kenpo.checks import check_combination
from kenpo.divergence import Term
from kenpo.errors import IllegalCombinationError, InputError
from kenpo.settings import apply_settings, differences, flat_settings
from kenpo.stages.base import (
    Advantage,
    Aggregate,
    Ratio,
    Regularizer,
    Scope,
    Selection,
    Shaping,
    Stage,
    Surrogate,
    Weight,
    reads_policy,
    snake,
)
from kenpo.types import Batch, Loss, Policy, Prepared, Rollouts


@dataclass(frozen=True)
class Algorithm:
    """Named, typed slots. Tuples where a slot maps a type to itself, single stages where types differ.

    ``loss = Σ aggregate · (penalty − weight · objective)``. ``status``: "paper", "our reading" or "reconstruction".
    ``updates``: the most optimizer steps that may consume one rollout batch (None: any); a trainer refuses more.
    """

    name: str
    source: str
    advantage: Advantage
    surrogate: Surrogate
    aggregate: Aggregate
    ratio: Ratio | None = None
    selection: tuple[Selection, ...] = ()
    shaping: tuple[Shaping, ...] = ()
    weights: tuple[Weight, ...] = ()
    regularizers: tuple[Regularizer, ...] = ()
    status: str = "paper"
    updates: int | None = None

    SLOTS: ClassVar[dict[str, type[Stage]]] = {
        "selection": Selection, "shaping": Shaping, "advantage": Advantage, "weights": Weight, "ratio": Ratio,
        "surrogate": Surrogate, "regularizers": Regularizer, "aggregate": Aggregate,
    }  # fmt: skip

    def __post_init__(self) -> None:
        for slot, kind in self.SLOTS.items():
            value = getattr(self, slot)
            if slot in TUPLE_SLOTS:
                value = tuple(value)
                object.__setattr__(self, slot, value)
            for stage in _stages_of(value):
                if not isinstance(stage, kind):
                    raise InputError(f"{self.name}: {slot} takes {kind.__name__} stages, got {type(stage).__name__}")
            names = [snake(s) for s in _stages_of(value)]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise IllegalCombinationError(
                    f"{self.name}: {slot} holds {twice[0]} twice; combine them into one stage"
                )
        check_combination(self)

    # -- what the planner asks ------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in the order they run."""
        return tuple(s for slot in self.SLOTS for s in _stages_of(getattr(self, slot)))

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of Rollouts and Policy that the stages read."""
        return _needs(self.stages) - {"returns"}

    @property
    def prepare_needs(self) -> frozenset[str]:
        """Those of `needs` that `prepare` reads: they must be there before the first update, however many there are."""
        early = () if self.advantage.policy_needs else (self.advantage,)
        return _needs((*self.selection, *self.shaping, *early))

    @property
    def terms(self) -> dict[str, Term]:
        """What the models are asked for, by policy field, where a stage chooses it. One field holds one kind."""
        found: dict[str, Term] = {}
        for term in (t for s in self.stages for t in s.terms):
            if found.setdefault(term.name, term) != term:
                raise IllegalCombinationError(
                    f"{self.name}: two stages want different {term.name}: {found[term.name]} and {term}; give both the "
                    "same divergence"
                )
        return found

    @property
    def reaches(self) -> frozenset[str]:
        """The Policy fields that get a gradient, at most."""
        return frozenset().union(*(s.reaches for s in self.stages))

    @property
    def uses_logp(self) -> bool:
        """Whether log-probs of the policy are read or learnt."""
        return "logp" in self.needs | self.reaches

    def crosses(self, *learners: Collection[str]) -> str | None:
        """Why the policy fields can't be learnt by separate models, each with the fields it makes, or None: they can.

        A ratio and its surrogate are one term, and so is each regularizer: its gradients must go to one learner.
        """
        live = tuple(s for s in (self.ratio, self.surrogate) if s is not None)
        for term in (live, *((r,) for r in self.regularizers)):
            reached = frozenset().union(*(s.reaches for s in term))
            parts = [sorted(reached.intersection(fields)) for fields in learners]
            met = [fields for fields in parts if fields]
            if len(met) > 1:
                who = " with ".join(map(snake, term))
                return f"{who} has gradients to {met[0][0]!r} and {met[1][0]!r}, which two separate models make"
        return None

    @property
    def scope(self) -> Scope:
        """The widest scope of any stage."""
        return max(s.span for s in self.stages)

    def two_phase(self, rollouts: Rollouts | None = None, *, whole_groups: bool = False) -> str | None:
        """Why the minibatch's log-probs must be known before `weigh`, or None if one phase will do.

        `rollouts` only tells whether ``logp_old`` is there; None assumes it is not. `whole_groups`: the caller's
        microbatches hold whole groups, so that stages of group scope run inside them (see `Algorithm.whole_groups`).
        """
        fresh = rollouts is None or rollouts.logp_old is None
        widest = Scope.GROUP if whole_groups else Scope.SEQUENCE
        if self.advantage.policy_needs:
            return f"{snake(self.advantage)} needs the policy's terms before advantages are known"
        for stage in self.weights:
            if stage.span > widest and reads_policy(stage, fresh):
                return f"{snake(stage)} must see the whole {stage.span.name.lower()} under the current policy"
        for part in self.live:
            if part.span > widest:
                return f"{snake(part)} couples the rollouts of a {part.span.name.lower()}"
        waiting = [snake(s) for s in self.weights if reads_policy(s, fresh)]
        if self.aggregate.counts_kept and waiting:
            return f"{snake(self.aggregate)} counts kept tokens and {waiting[0]} needs the policy to keep them"
        return None

    def whole_groups(self, rollouts: Rollouts | None = None) -> str | None:
        """Why one phase needs microbatches of whole groups, or None: any rows will do, or two phases are needed anyway.

        Where a group does not fit into a microbatch, two phases give the same: `two_phase` without its promise.
        """
        return None if self.two_phase(rollouts, whole_groups=True) else self.two_phase(rollouts)

    @property
    def live(self) -> tuple[Ratio | Surrogate | Regularizer, ...]:
        """The stages that carry a gradient."""
        return tuple(s for s in (self.ratio, self.surrogate, *self.regularizers) if s is not None)

    # -- variation ------------------------------------------------------------------------------------------------

    def but(self, **slots: Any) -> Algorithm:
        """A copy with some slots (or name, source, status) replaced."""
        unknown = slots.keys() - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise InputError(f"{self.name}: no slot {sorted(unknown)[0]!r}; slots are {', '.join(self.SLOTS)}")
        return dataclasses.replace(self, **slots)

    def with_settings(self, settings: Mapping[str, Any]) -> Algorithm:
        """A copy with numbers changed by dotted key, e.g. ``{"surrogate.low": 0.1, "regularizers": []}``.

        Raises `UnknownNameError` for a key that names no number of this algorithm, `InputError` for a value that does
        not fit. All settings are applied together, then checked.
        """
        return apply_settings(self, settings, tuple_slots=TUPLE_SLOTS)

    def adding(self, name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
        """A copy with one more weight, shaping, selection or regularizer; see `kenpo.stages.addable`."""
        from kenpo.stages import addable

        slot, stage = addable(name, settings)
        return self.but(**{slot: (*getattr(self, slot), stage)})

    def settings(self) -> dict[str, Any]:
        """Every number of every stage by dotted key, in running order."""
        return flat_settings(self)

    def diff(self, other: Algorithm) -> dict[str, tuple[Any, Any]]:
        """The slots or numbers in which two algorithms differ: ``{"surrogate.low": (0.2, 0.0003)}``."""
        return differences(self, other)

    # -- running order; a method that fits no slot overrides one of these -------------------------------------------

    def prepare(self, rollouts: Rollouts, state: Any = None) -> Prepared:
        """See `kenpo.prepare`."""
        return order.run_prepare(self, rollouts, state)

    def weigh(self, prepared: Prepared, policy: Policy | None = None) -> Batch:
        """See `kenpo.weigh`."""
        return order.run_weigh(self, prepared, policy)

    def objective(self, batch: Batch, policy: Policy, measure: bool = True, of: Collection[str] | None = None) -> Loss:
        """See `kenpo.objective`."""
        return order.run_objective(self, batch, policy, measure, of)


TUPLE_SLOTS = ("selection", "shaping", "weights", "regularizers")


def _needs(stages: tuple[Stage, ...]) -> frozenset[str]:
    return frozenset().union(*(s.needs for s in stages))


def _stages_of(value: Any) -> tuple[Stage, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
