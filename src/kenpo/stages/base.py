"""What a stage is: a frozen dataclass that binds numbers to a pure tensor function and says what it reads and spans."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar, get_args, get_origin

from torch import Tensor

from kenpo.divergence import Term
from kenpo.errors import InputError
from kenpo.ops import groups
from kenpo.stages.context import Context
from kenpo.types import ANCHORS, POLICY_FIELDS, Advantaged, Totals


class Scope(IntEnum):
    """The smallest unit a stage must see whole."""

    TOKEN = 0
    SEQUENCE = 1
    GROUP = 2
    BATCH = 3
    STREAM = 4


@dataclasses.dataclass(frozen=True)
class Stage:
    """Base of all stages. Subclasses are frozen dataclasses; their fields are the knobs that ``settings`` can change.

    ``span`` and ``needs`` are facts about the instance: they may depend on its numbers and include nested stages.
    """

    _scope: ClassVar[Scope] = Scope.TOKEN
    _needs: ClassVar[frozenset[str]] = frozenset()
    #: True if the stage does nothing while every log-ratio to its anchor is 0.
    anchor_sensitive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            checked = _typed(value, _hints(type(self))[f.name])
            if checked is _WRONG:
                raise InputError(f"{snake(self)}.{f.name}: {value!r} is not {_words(_hints(type(self))[f.name])}")
            object.__setattr__(self, f.name, checked)
        self.check()

    def check(self) -> None:
        """Refuse numbers that make no sense; raises `InputError`."""

    @property
    def nested(self) -> Iterator[Stage]:
        """Stages held in this stage's fields."""
        return (v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Stage))

    @property
    def terms(self) -> tuple[Term, ...]:
        """The policy fields whose kind the stage chooses, such as which divergence from a teacher; nested ones too."""
        return tuple(t for s in self.nested for t in s.terms)

    @property
    def span(self) -> Scope:
        """The smallest unit this stage must see whole, nested stages included."""
        return max([self._scope, *(s.span for s in self.nested)])

    @property
    def anchor(self) -> str | None:
        """The policy that log-ratios are taken against, a key of `ANCHORS`; as a rule a field of the stage."""
        return None

    @property
    def needs(self) -> frozenset[str]:
        """The optional fields of Rollouts and Policy this stage reads, nested stages included."""
        own = self._needs
        if self.anchor in ANCHORS:
            own = own | {ANCHORS[self.anchor]}
        return own.union(*(s.needs for s in self.nested))

    @property
    def policy_needs(self) -> frozenset[str]:
        """Those of `needs` that come from the policy's forward pass."""
        return self.needs & POLICY_FIELDS.keys()

    @property
    def reaches(self) -> frozenset[str]:
        """The Policy fields that get a gradient through this stage, at most."""
        return frozenset()

    @property
    def distance(self) -> tuple[str, str] | None:
        """The two policies that must differ for the stage to act: ("policy" or an anchor, an anchor); None: it acts
        without."""
        if self.anchor not in ANCHORS:
            return None
        corrects = "logp_sampler" in self.needs and self.anchor != "sampler"
        return (self.anchor, "sampler") if corrects else ("policy", self.anchor)

    @property
    def off(self) -> str | None:
        """Why the stage does nothing at its numbers, or None."""
        return None

    def refuse(self, ok: bool, what: str) -> None:
        """Raise `InputError` naming this stage unless `ok`."""
        if not ok:
            raise InputError(f"{snake(self)}: {what}")


@dataclasses.dataclass(frozen=True)
class Selection(Stage):
    """ctx -> rollouts kept [B] bool. Sees the raw outcome and what earlier selections left."""

    _scope = Scope.GROUP

    @property
    def by(self) -> str | None:
        """What the stage tests: the "outcome" or named "parts" of the reward; None: neither."""
        return None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that it tests; empty: all."""
        return ()

    def __call__(self, ctx: Context) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Shaping(Stage):
    """(rewards [B], ctx) -> rewards [B]."""

    _scope = Scope.SEQUENCE

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the reward's parts that it reads."""
        return ()

    def __call__(self, rewards: Tensor, ctx: Context) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Advantage(Stage):
    """(shaped rewards [B], ctx, state) -> (advantages [B,T], state), or `Advantaged` where a critic gets returns."""

    _scope = Scope.GROUP
    #: True for an advantage of the reward's named parts, which does not read the outcome itself.
    reads_parts: ClassVar[bool] = False
    #: False for an advantage that says nothing of the outcome, so that the rows need not be the policy's samples.
    judges: ClassVar[bool] = True
    #: True if `Advantaged.returns` is given.
    makes_returns: ClassVar[bool] = False

    @property
    def charges_kl(self) -> bool:
        """Whether the reward of a token pays for its distance to the reference, which the loss then may not."""
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that it reads; empty: all."""
        return ()

    @property
    def mixture(self) -> float:
        """The teacher's share in the mixture of two models that has to sample; 0: the policy samples."""
        return 0.0

    @property
    def distance(self) -> None:
        """None: an advantage compares outcomes, or π_θ with a teacher."""
        return None

    @property
    def group_relative(self) -> bool:
        """Whether a rollout is judged against others of its group, so that one sample per prompt teaches nothing."""
        return self.span == Scope.GROUP

    def __call__(self, rewards: Tensor, ctx: Context, state: Any) -> tuple[Tensor, Any] | Advantaged:
        raise NotImplementedError

    @property
    def prioritises(self) -> bool:
        """Whether it will say how often each prompt should be drawn (`priorities`)."""
        return type(self).priorities is not Advantage.priorities

    def priorities(self, state: Any) -> Mapping[int, float] | None:
        """How often each prompt (by its ``prompt_id``) should be drawn, relative to the others, or None: all alike.

        `state` is what the last batch handed on. A source reads it; prompts that are not named get the mean weight.
        """
        return None


@dataclasses.dataclass(frozen=True)
class Weight(Stage):
    """ctx -> weights [B,T] ≥ 0, detached; a bool mask is a special case. Runs without grad.

    A weight that reads the policy being optimised names ``"logp"`` in its needs.
    """

    #: True for a correction π_old/μ of the sampler mismatch; it must not meet a ratio anchored at the sampler.
    is_correction: ClassVar[bool] = False
    #: True for a weight that is the importance ratio of π_θ itself, for a surrogate without one.
    is_ratio: ClassVar[bool] = False

    @property
    def carries_correction(self) -> bool:
        """Whether kept tokens are weighed by π_old/μ, so that another such weight would count it twice."""
        return self.is_correction

    def __call__(self, ctx: Context) -> Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Ratio(Stage):
    """ctx -> ratio [B,T], with grad. `bounded` says where a bound inside the ratio acts, for metrics."""

    @property
    def reaches(self) -> frozenset[str]:
        return self.policy_needs | {"logp"}

    def __call__(self, ctx: Context) -> Tensor:
        raise NotImplementedError

    def bounded(self, ctx: Context) -> Tensor | None:
        """[B,T] bool, or None if this ratio has no bound."""
        return None


@dataclasses.dataclass(frozen=True)
class Surrogate(Stage):
    """(ratio, ctx) -> objective [B,T], to be maximised. `clipped` says where its bound acts, for metrics."""

    #: False for a surrogate that takes no ratio (the score function).
    takes_ratio: ClassVar[bool] = True
    #: The anchor that the ratio must have; None: any.
    ratio_anchor: ClassVar[str | None] = None
    #: False for a surrogate that is linear in the ratio: no bound that a distance could reach.
    bounds: ClassVar[bool] = True
    #: True if the objective is right for samples of any policy, so that it needs no ratio.
    any_samples: ClassVar[bool] = False

    @property
    def reaches(self) -> frozenset[str]:
        return self.policy_needs or frozenset(() if self.takes_ratio else ("logp",))

    def decided(self, ctx: Context) -> Tensor:
        """[B] bool: rollouts of a group whose outcome is decided, which `Totals.contrasts` counts by group.

        As a rule: two answered rollouts (of at least one trainable token) differ in their raw reward.
        """
        return groups.group_varies(ctx.rewards, ctx.group, ctx.selected & ctx.mask.any(-1))

    def __call__(self, ratio: Tensor | None, ctx: Context) -> Tensor:
        raise NotImplementedError

    def clipped(self, ratio: Tensor | None, ctx: Context) -> Tensor | None:
        """[B,T] bool, or None if this surrogate has no bound."""
        return None

    def figures(self, ctx: Context) -> dict[str, tuple[Tensor, Tensor]]:
        """Further metrics of this surrogate's own, as sums and counts that add up over microbatches."""
        return {}


@dataclasses.dataclass(frozen=True)
class Aggregate(Stage):
    """(mask, kept [B,T], totals) -> the linear weight [B,T] of each token in the loss. Denominators are global."""

    #: Scope of what it needs beyond the totals: nothing.
    _scope = Scope.TOKEN

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        raise NotImplementedError

    @property
    def over(self) -> str:
        """Which tokens the denominator counts; as a rule a field of the stage."""
        return "all"

    @property
    def counts_kept(self) -> bool:
        """Whether a denominator depends on which tokens the weights kept."""
        return self.over != "all"

    @property
    def totals(self) -> frozenset[str]:
        """The fields of `Totals` that the denominators come from; as a rule: any."""
        return frozenset(f.name for f in dataclasses.fields(Totals))


@dataclasses.dataclass(frozen=True)
class Regularizer(Stage):
    """ctx -> penalty [B,T], with grad, added to the loss. May name its own rows and aggregate."""

    @property
    def charges_kl(self) -> bool:
        """Whether it is a KL of the policy to the reference."""
        return False

    #: True if the rows it names are the supervised ones (``origin`` 4), which are then what its totals count.
    supervised: ClassVar[bool] = False

    @property
    def reaches(self) -> frozenset[str]:
        return self.policy_needs or frozenset({"logp"})

    def __call__(self, ctx: Context) -> Tensor:
        raise NotImplementedError

    def rows(self, ctx: Context) -> Tensor | None:
        """[B,T] bool: the positions this term covers, known before the policy runs; None: the trainable tokens."""
        return None

    def clipped(self, ctx: Context) -> Tensor | None:
        """[B,T] bool: where a bound of its own acts, for metrics; None if it has none."""
        return None

    @property
    def own_aggregate(self) -> Aggregate | None:
        """How this term is averaged; None: as the algorithm's objective."""
        return None


def reads_policy(stage: Stage, fresh: bool) -> bool:
    """Whether a stage reads the policy being optimised; without ``logp_old``, π_old is that policy too."""
    return bool(stage.policy_needs) or (fresh and "logp_old" in stage.needs)


def snake(stage: Stage | type[Stage]) -> str:
    """A stage's name in settings: its class name in snake case, acronyms whole.

    >>> snake(Stage)
    'stage'
    """
    name = (stage if isinstance(stage, type) else type(stage)).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


_WRONG = object()
_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _typed(value: Any, hint: Any) -> Any:
    """`value` if it fits the annotation (ints become floats where a float is wanted), else `_WRONG`."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        fits = [_typed(value, h) for h in get_args(hint)]
        return next((v for v in fits if v is not _WRONG), _WRONG)
    if origin is typing.Literal:
        return value if value in get_args(hint) and not isinstance(value, bool) else _WRONG
    if origin is tuple:
        return tuple(value) if isinstance(value, list | tuple) else _WRONG
    if hint is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        small = good and (abs(value) <= 1e308 or abs(value) == math.inf)  # a whole number may be too large for a float
        return float(value) if small else _WRONG
    if hint is int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return whole if isinstance(whole, int) and not isinstance(whole, bool) else _WRONG
    if isinstance(hint, type):
        return value if isinstance(value, hint) else _WRONG
    return value


def _words(hint: Any) -> str:
    """What fits an annotation, for the one who gave something else."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(h) for h in get_args(hint))
    if origin is typing.Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin is tuple:
        return "a list"
    named = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}
    return named.get(hint) or f"a {snake(hint)}" if isinstance(hint, type) else str(hint)
