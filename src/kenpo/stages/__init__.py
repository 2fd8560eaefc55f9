"""The parts: frozen dataclasses that bind numbers to pure tensor functions, one file per slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from kenpo.errors import InputError, unknown_name
from kenpo.stages.advantages import (
    BatchScaled,
    GlobalWhiten,
    GroupCentred,
    GroupRobust,
    GroupZScore,
    LeaveOneOut,
    Ones,
    ZeroSumKL,
)
from kenpo.stages.aggregates import (
    ContrastMean,
    FixedLength,
    GroupTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from kenpo.stages.answers import FrequencyAware, MajorityVote, TargetDistribution
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
    snake,
)
from kenpo.stages.batch_trust import (
    CorrectionMoment,
    GroupMass,
    MomentClip,
    SecondMoment,
    SpuriousTokens,
    Surprisal,
    WeightMoment,
)
from kenpo.stages.context import Context
from kenpo.stages.contrast import GibbsGap, GroupInfoNCE
from kenpo.stages.corrections import BinaryKLMask, MaskedIS, TruncatedIS
from kenpo.stages.critics import GAE, CriticVerdict, GreedyBaseline
from kenpo.stages.decisions import DecisionRatio
from kenpo.stages.gaps import Added, FixedNegative, FutureGap, Mix, TeacherGap
from kenpo.stages.origins import (
    ByOrigin,
    ExpertNLL,
    ExpertRatio,
    GoldenAnswer,
    OffContext,
    OwnRows,
    OwnZScore,
    ShapedProbability,
)
from kenpo.stages.parts import PartsZScore
from kenpo.stages.preference import PairLogistic, PairSquared, TurnDensityRatio
from kenpo.stages.pseudo import AgreementSplit, AgreementSwitch, ShortestOfEach
from kenpo.stages.queries import QueryKL, QueryWeight
from kenpo.stages.rarity import InverseLikelihood, VarianceRatio
from kenpo.stages.ratios import LogClip, PowerRatio, PrefixMinRatio, SequenceRatio, TokenRatio
from kenpo.stages.regularizers import EntropyBonus, KLToReference
from kenpo.stages.rejection import Compatibility, Rejection, Rule
from kenpo.stages.risk import QuantileRisk
from kenpo.stages.routing import RouterShift, RouterStability
from kenpo.stages.selection import DropTruncated, DropUniformGroups
from kenpo.stages.selective import SelectiveRatio
from kenpo.stages.shaping import Calibration, SoftOverlong
from kenpo.stages.surrogates import (
    ArctanGate,
    BranchClip,
    CentredClip,
    ChiSquareClip,
    Clip,
    DetachedClip,
    DualClip,
    GradientPreservingClip,
    Linear,
    ScoreFunction,
    ShiftedMean,
    SoftGate,
)
from kenpo.stages.teachers import (
    CappedRatio,
    EvidenceRatio,
    FallMask,
    Hinted,
    LeastLikely,
    MinimiseTerm,
    OriginShare,
    PrefixShare,
    SampledGap,
    SquaredDrift,
    TeacherTerm,
    TermPenalty,
)
from kenpo.stages.trackers import BetaTracker
from kenpo.stages.trust import (
    DivergenceMask,
    OffPolicySequences,
    RatioGate,
    SequenceKLMask,
    Untruncated,
)
from kenpo.stages.values import PositiveNLL, SupervisedNLL, ValueLoss

_BASES = {"selection": Selection, "shaping": Shaping, "weights": Weight, "regularizers": Regularizer}


def addable(name: str, settings: Mapping[str, Any] | None = None) -> tuple[str, Stage]:
    """(slot, stage with its default numbers) for the snake-case name of a catalogued weight, shaping, selection or
    regularizer. A number that must be given is taken from `settings`, under ``slot.name.field``.

    Raises `UnknownNameError`; `InputError` if such a number is missing."""
    found = {
        snake(v): (slot, v)
        for v in globals().values()
        for slot, base in _BASES.items()
        if isinstance(v, type) and issubclass(v, base) and v is not base
    }
    if name not in found:
        raise unknown_name("stage", name, found, "(anything else: --algorithm my.py:MINE)")
    slot, cls = found[name]
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    keys = {f: f"{slot}.{name}.{f}" for f in required}
    missing = [key for key in keys.values() if key not in (settings or {})]
    if missing:
        raise InputError(f"{name} has no default for {missing[0]}: set it too, e.g. --set {missing[0]}=VALUE")
    return slot, cls(**{f: (settings or {})[key] for f, key in keys.items()})
