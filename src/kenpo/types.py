"""The data that flows through the house: rollouts, policy terms, what `prepare` and `weigh` hand on, and the loss.

Axes: ``B`` rollouts, ``T`` token positions, ``K`` experts per token (or top-K ids), ``L`` mixture-of-experts layers.

One alignment rule: every per-token tensor has the shape of ``tokens``, and position ``t`` speaks of the probability of
token ``t`` given those before it. Nothing precedes token 0, so ``mask[:, 0]`` is false. There are no shifted twins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kenpo.errors import InputError
from kenpo.fields import (
    ANCHORS,
    CONTEXT,
    EXPERT,
    POLICY_FIELDS,
    REPHRASED,
    ROLLOUT_FIELDS,
    SUPERVISED,
    Fields,
    FieldSpec,
    Rows,
    as_index,
    checked,
    device_of,
)

__all__ = [
    "ANCHORS", "EXPERT", "POLICY_FIELDS", "ROLLOUT_FIELDS", "SUPERVISED", "Advantaged", "Batch",
    "FieldSpec", "Loss", "Policy", "Prepared", "Result", "Rollouts", "Rows", "Totals",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rollouts(Fields):
    """One batch of sampled responses and everything known about them before the update.

    Only ``mask``, ``group`` and ``rewards`` are required; a stage that needs more says so in its ``needs``.

    ======================= ================ ===========================================================================
    field                   shape            meaning
    ======================= ================ ===========================================================================
    mask                    [B,T] bool       tokens the policy sampled and that may be trained on
    group                   [B] int          rollouts compared together
    rewards                 [B]              raw scalar outcome; NaN: no verdict, the rollout enters no statistic
    tokens                  [B,T] int        prompt, sampled and tool tokens in order; -1 where there is no token
    prompt_id               [B] int          stable identity of the prompt
    prefix                  [B] int          rows with one number hold the same tokens before their first trainable one
    token_rewards           [B,T]            rewards per token, where a method has them
    answer                  [B] int          identity of the extracted answer, -1 unparsable
    baseline                [B]              reward of the greedy response (ReMax)
    logp_sampler            [B,T]            log μ, the behaviour policy that sampled, however stale
    logp_old                [B,T]            log π_old, scored by the trainer before this batch's updates; absent when
                                             one optimizer step consumes the batch (π_old is then π_θ, detached)
    logp_ref, logp_teacher  [B,T]            reference policy; a teacher
    values_old, score_old   [B,T], [B]       critic, and scalar head at the last token, before the update
    drift                   [B]              mean |log π_then − log π_now| over the prompt's previous response; NaN: a
                                             first visit
    margin                  [B]              by how much this response should beat a worse one of its group
    logp_guided             [B,T]            under the privileged prompt that sampled it
    logp_prox               [B,T]            an EWMA proximal policy
    logp_source             [B]              mean log-prob per token under the other model that wrote the response, in
                                             that model's tokens; NaN: the response is the policy's own (GRAFT)
    topk_ids                [B,T,K] int      K likeliest tokens of the sampler or of π_old; with their log-probs in
                                             topk_logp_sampler, topk_logp_old [B,T,K]
    support_ids             [B,T,K] int      ids that top-k / top-p sampling kept, -1 padded (absent: whole vocabulary)
    prompt_mask             [B,T] bool       prompt positions that a stage scores
    policy_version          [B,T] int        which weights produced each token
    origin                  [B] int          0 on-policy, 1 replayed, 2 expert, 3 rephrased, 4 supervised: a row without
                                             reward, read only by regularizers that name it in their rows
    trajectory              [B] int          rows of one episode share a number (absent: each row is one)
    target_ids, target_prob [B,K]            a prompt's valid answers (-1 padded) and their target shares
    truncated               [B] bool         the response hit the length limit
    hinted                  [B] bool         the teacher was shown a hint for this row (absent: every row has a teacher)
    turn                    [B,T] int        turn number
    routes, router_logp_old [B,T,L,K]        experts chosen while sampling, and their old log-scores
    reward_parts            name -> [B]      named components of the reward
    contexts                name -> [B,P]    ids of another prompt for the same response, -1 padded; all -1: the row has
                                             none (`kenpo.contexts`)
    ======================= ================ ===========================================================================

    Floating fields keep the dtype they came with. Entries at masked positions may hold anything, NaN included.
    Raises `InputError` if a shape, kind or 0/1 mask is wrong, or if ``mask[:, 0]`` holds a true entry.
    """

    mask: Tensor
    group: Tensor
    rewards: Tensor
    tokens: Tensor | None = None
    prompt_id: Tensor | None = None
    prefix: Tensor | None = None
    token_rewards: Tensor | None = None
    answer: Tensor | None = None
    baseline: Tensor | None = None
    logp_sampler: Tensor | None = None
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    logp_teacher: Tensor | None = None
    values_old: Tensor | None = None
    score_old: Tensor | None = None
    margin: Tensor | None = None
    drift: Tensor | None = None
    logp_guided: Tensor | None = None
    logp_prox: Tensor | None = None
    logp_source: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logp_sampler: Tensor | None = None
    topk_logp_old: Tensor | None = None
    support_ids: Tensor | None = None
    prompt_mask: Tensor | None = None
    policy_version: Tensor | None = None
    origin: Tensor | None = None
    trajectory: Tensor | None = None
    target_ids: Tensor | None = None
    target_prob: Tensor | None = None
    truncated: Tensor | None = None
    hinted: Tensor | None = None
    turn: Tensor | None = None
    routes: Tensor | None = None
    router_logp_old: Tensor | None = None
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    contexts: Mapping[str, Tensor] = field(default_factory=dict)

    _specs = ROLLOUT_FIELDS

    def __post_init__(self) -> None:
        mask = self.mask if isinstance(self.mask, Tensor) else torch.as_tensor(self.mask)
        if mask.dim() != 2:
            raise InputError(f"mask: expected shape [B,T], got {list(mask.shape)}")
        batch, width = mask.shape
        for name, value in self.tensors().items():
            object.__setattr__(self, name, checked(name, value, ROLLOUT_FIELDS[name], batch, width))
        parts = {n: checked(f"reward_parts.{n}", v, FieldSpec("B", "float"), batch, width)
                 for n, v in self.reward_parts.items()}  # fmt: skip
        object.__setattr__(self, "reward_parts", parts)
        ids = {n: checked(f"contexts.{n}", v, CONTEXT, batch, width) for n, v in self.contexts.items()}
        object.__setattr__(self, "contexts", ids)
        if width and bool(self.mask[:, 0].any()):
            raise InputError(
                "mask: position 0 is trainable, but no token precedes it; put the prompt (or one masked column) first"
            )

    def __len__(self) -> int:
        return self.mask.shape[0]

    @property
    def supervised(self) -> Tensor:
        """[B] bool: rows without a reward (``origin`` 4); they enter no statistic and have advantage 0."""
        return torch.zeros_like(self.mask.any(-1)) if self.origin is None else self.origin == SUPERVISED

    @property
    def elsewhere(self) -> Tensor:
        """[B] bool: rows whose response the policy did not sample after the row's own prompt (an expert's, a
        partner's, a restated one, one under the context ``guided``): their ``logp_sampler`` is another sampler's."""
        foreign = torch.zeros_like(self.mask.any(-1))
        if self.origin is not None:
            foreign = (self.origin == EXPERT) | (self.origin == REPHRASED)
        if self.logp_source is not None:
            foreign = foreign | self.logp_source.isfinite()
        return foreign | (self.contexts["guided"] >= 0).any(-1) if "guided" in self.contexts else foreign

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        made = super()._each(change)
        for named in ("reward_parts", "contexts"):
            object.__setattr__(made, named, {n: change(v) for n, v in getattr(self, named).items()})
        return made


@dataclass(frozen=True, eq=False)
class Policy(Fields):
    """What the model being optimised says about the rollouts: its terms, which carry the gradient.

    ``logp`` [B,T]; ``entropy``, ``values`` (V before token t) [B,T]; ``score`` [B], a scalar at the last token (a
    reward model's, or a terminal value); ``topk_logp`` [B,T,K] at the ids in ``rollouts.topk_ids``; ``kl_ref``,
    ``kl_sampler``, ``kl_teacher`` [B,T], full-vocabulary divergences; ``router_logp`` [B,T,L,K] at the experts in
    ``rollouts.routes``. Each is optional, but one must be there: a reward model or a critic has no ``logp``.
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    score: Tensor | None = None
    topk_logp: Tensor | None = None
    kl_ref: Tensor | None = None
    kl_sampler: Tensor | None = None
    kl_teacher: Tensor | None = None
    router_logp: Tensor | None = None

    _specs = POLICY_FIELDS

    def __post_init__(self) -> None:
        given = self.tensors()
        if not given:
            raise InputError("policy: no term is given; pass at least one field, e.g. logp of shape [B,T]")
        first = max(given, key=lambda n: (len(self._specs[n].axes) > 1, n == "logp"))
        axes, value = self._specs[first].axes, given[first]
        if not isinstance(value, Tensor) or value.dim() != len(axes):
            raise InputError(f"policy.{first}: expected a tensor of shape [{','.join(axes)}]")
        batch, width = value.shape[0], value.shape[1] if len(axes) > 1 else 0
        for name, value in given.items():
            object.__setattr__(self, name, checked(f"policy.{name}", value, POLICY_FIELDS[name], batch, width))

    def __len__(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    def detach(self) -> Policy:
        """The same numbers without their graph."""
        return self.replace(**{n: v.detach() for n, v in self.tensors().items()})


@dataclass(frozen=True)
class Totals:
    """Counts over one whole optimizer minibatch, all ranks, after selection and weights. Denominators come from here.

    ``kept`` means trainable and of weight > 0. ``sequences`` counts every selected rollout, fully masked ones too;
    ``kept_sequences`` those with a kept token. ``group_tokens`` and ``group_kept_tokens`` [B] give, on each row, the
    trainable and kept tokens of the row's group. ``weight_sum`` is the sum of the weights. ``contrasts`` counts the
    groups with a decided outcome: as a rule, two answered rollouts with different raw rewards (`Surrogate.decided`).
    ``trajectories`` counts episodes: rows with one ``trajectory`` number are one. Rows without a reward count nowhere.
    All are 0-d or [B] tensors in the dtype of the advantages.
    """

    tokens: Tensor
    kept_tokens: Tensor
    weight_sum: Tensor
    sequences: Tensor
    kept_sequences: Tensor
    groups: Tensor
    group_tokens: Tensor
    group_kept_tokens: Tensor
    contrasts: Tensor
    trajectories: Tensor

    def rows(self, index: Tensor | slice) -> Totals:
        """The same global counts for a subset of rows."""
        return self._each(lambda v: v[index] if v.dim() else v)

    def to(self, *args: Any, **kwargs: Any) -> Totals:
        """The same counts on another device."""
        device = device_of(*args, **kwargs)
        return self._each(lambda v: v.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Totals:
        return Totals(**{f.name: change(getattr(self, f.name)) for f in dataclasses.fields(self)})


class Advantaged(NamedTuple):
    """What an advantage stage returns: ``advantages`` [B,T]; ``returns`` [B,T], what a critic learns to predict (None:
    there is no critic); ``state``, handed on to the next batch."""

    advantages: Tensor
    returns: Tensor | None = None
    state: Any = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Rollouts with advantages, as `prepare` hands them on.

    ``advantages`` [B,T], 0 off the mask and on unselected rows (None while an advantage waits for the policy);
    ``selected`` [B] bool; ``shaped`` [B] the rewards after shaping; ``group_size`` [B] selected rollouts in the row's
    group; ``returns`` [B,T] where a critic learns; ``state`` what a stateful stage hands on to the next batch.
    """

    rollouts: Rollouts
    advantages: Tensor | None
    selected: Tensor
    shaped: Tensor
    group_size: Tensor
    returns: Tensor | None = None
    state: Any = None

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, rows: Rows) -> Prepared:
        """One minibatch of the prepared batch."""
        rows = as_index(rows)
        return self._each(self.rollouts[rows], lambda v: v[rows])

    def to(self, *args: Any, **kwargs: Any) -> Prepared:
        """A copy with every tensor on another device. The state stays where it is."""
        device = device_of(*args, **kwargs)
        return self._each(self.rollouts.to(device), lambda v: v.to(device))

    @property
    def compared(self) -> Tensor:
        """[B] bool: selected rollouts with a reward; the others are supervised rows."""
        return self.selected & ~self.rollouts.supervised

    def _each(self, rollouts: Rollouts, change: Callable[[Tensor], Tensor]) -> Prepared:
        named = {n: v for n in _PREPARED if (v := getattr(self, n)) is not None}
        return dataclasses.replace(self, rollouts=rollouts, **{n: change(v) for n, v in named.items()})


_PREPARED = ("advantages", "selected", "shaped", "group_size", "returns")


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimizer minibatch with its weights and global totals, as `weigh` hands it on.

    ``weights`` [B,T] is the detached product of the stages evaluated so far (None: all ones); ``pending`` counts the
    weight stages that wait for the microbatch's own forward pass. ``extra`` holds, per regularizer that names its own
    rows, those rows and their totals. ``whole`` is false once rows were cut out.
    """

    prepared: Prepared
    advantages: Tensor
    weights: Tensor | None
    pending: tuple[int, ...]
    totals: Totals
    extra: Mapping[int, tuple[Tensor, Totals]] = field(default_factory=dict)
    whole: bool = True

    def __len__(self) -> int:
        return len(self.prepared)

    def __getitem__(self, rows: Rows) -> Batch:
        """One microbatch: its rows, the whole minibatch's totals."""
        rows = as_index(rows)
        part = self.prepared[rows]
        return self._each(part, lambda v: v[rows], lambda t: t.rows(rows), self.whole and len(part) == len(self))

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """A copy with every tensor on another device."""
        device = device_of(*args, **kwargs)
        return self._each(self.prepared.to(device), lambda v: v.to(device), lambda t: t.to(device), self.whole)

    @property
    def whole_groups(self) -> Tensor:
        """[B] bool: every selected rollout of the row's group is among these rows."""
        group = self.prepared.rollouts.group
        here = ((group[:, None] == group) & self.prepared.compared).sum(-1)
        return here == self.prepared.group_size

    def _each(
        self, prepared: Prepared, change: Callable[[Tensor], Tensor], count: Callable[[Totals], Totals], whole: bool
    ) -> Batch:
        return Batch(
            prepared=prepared,
            advantages=change(self.advantages),
            weights=None if self.weights is None else change(self.weights),
            pending=self.pending,
            totals=count(self.totals),
            extra={k: (change(own), count(totals)) for k, (own, totals) in self.extra.items()},
            whole=whole,
        )


@dataclass(frozen=True, eq=False)
class Loss:
    """A microbatch's share of the minibatch loss: already divided by the minibatch's totals, so shares add up.

    ``loss`` is a scalar with a graph to the policy's fields. ``weights`` [B,T] are the detached weights that were used.
    ``sums`` maps a metric's name to (sum, count), which add up over microbatches and ranks: add sums to sums and counts
    to counts, divide at the end (`kenpo.metrics.as_floats`). ``extremes`` maps to a running maximum,
    -inf over nothing. ``moved`` says of
    each stage that acts on a distance whether there was any (0-d bool; join by "or", then ask `kenpo.metrics.blind`).
    All three are empty when the caller asked for no metrics.
    """

    loss: Tensor
    weights: Tensor
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    extremes: Mapping[str, Tensor] = field(default_factory=dict)
    moved: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Result:
    """What `evaluate` returns: ``coefficients`` [B,T] is d loss / d logp (0 for an algorithm that reads no log-probs);
    ``gradients`` holds d loss / d field for every differentiable field of Policy that the algorithm read."""

    loss: Tensor
    coefficients: Tensor
    advantages: Tensor
    weights: Tensor
    metrics: dict[str, float]
    state: Any
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
