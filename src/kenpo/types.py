"""The data that flows through the house: rollouts, policy terms, what `prepare` and `weigh` hand on, and the loss.

Axes: ``B`` rollouts, ``T`` token positions, ``K`` experts per token (or top-K ids), ``L`` mixture-of-experts layers.

One alignment rule: every per-token tensor has the shape of ``tokens``, and position ``t`` speaks of the probability of
token ``t`` given those before it. Nothing precedes token 0, so ``mask[:, 0]`` is false. There are no shifted twins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.errors import InputError


class FieldSpec(NamedTuple):
    """Axes (a string of B, T, K, L), kind of number, and what stands in padding when a batch is widened."""

    axes: str
    kind: str  # "float" | "int" | "bool"
    pad: float = 0


ROLLOUT_FIELDS: dict[str, FieldSpec] = {
    "mask": FieldSpec("BT", "bool"),
    "group": FieldSpec("B", "int"),
    "rewards": FieldSpec("B", "float"),
    "tokens": FieldSpec("BT", "int", -1),
    "prompt_id": FieldSpec("B", "int"),
    "token_rewards": FieldSpec("BT", "float"),
    "answer": FieldSpec("B", "int"),
    "baseline": FieldSpec("B", "float"),
    "logp_sampler": FieldSpec("BT", "float"),
    "logp_old": FieldSpec("BT", "float"),
    "logp_ref": FieldSpec("BT", "float"),
    "values_old": FieldSpec("BT", "float"),
    "logp_guided": FieldSpec("BT", "float"),
    "logp_prox": FieldSpec("BT", "float"),
    "logp_source": FieldSpec("B", "float"),
    "topk_ids": FieldSpec("BTK", "int", -1),
    "topk_logp_sampler": FieldSpec("BTK", "float"),
    "topk_logp_old": FieldSpec("BTK", "float"),
    "support_ids": FieldSpec("BTK", "int", -1),
    "prompt_mask": FieldSpec("BT", "bool"),
    "policy_version": FieldSpec("BT", "int", -1),
    "origin": FieldSpec("B", "int"),
    "truncated": FieldSpec("B", "bool"),
    "turn": FieldSpec("BT", "int"),
    "routes": FieldSpec("BTLK", "int", -1),
    "router_logp_old": FieldSpec("BTLK", "float"),
}

POLICY_FIELDS: dict[str, FieldSpec] = {
    "logp": FieldSpec("BT", "float"),
    "entropy": FieldSpec("BT", "float"),
    "values": FieldSpec("BT", "float"),
    "topk_logp": FieldSpec("BTK", "float"),
    "kl_ref": FieldSpec("BT", "float"),
    "kl_sampler": FieldSpec("BT", "float"),
    "router_logp": FieldSpec("BTLK", "float"),
}


def _checked(name: str, value: Any, spec: FieldSpec, batch: int, width: int) -> Tensor:
    """`value` as a tensor of the kind and shape that `spec` asks for, or an error that names the field."""
    x = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if x.dim() != len(spec.axes):
        raise InputError(f"{name}: expected {len(spec.axes)} axes [{','.join(spec.axes)}], got shape {list(x.shape)}")
    for axis, size in zip(spec.axes, x.shape, strict=True):
        wanted = {"B": batch, "T": width}.get(axis, size)
        if size != wanted:
            raise InputError(f"{name}: shape {list(x.shape)} does not fit the mask's [B={batch}, T={width}]")
    if spec.kind == "bool" and x.dtype != torch.bool:
        if not bool(((x == 0) | (x == 1)).all()):
            raise InputError(f"{name}: holds values other than 0 and 1; pass a 0/1 or bool tensor")
        return x.bool()
    if spec.kind == "int":
        if x.dtype.is_floating_point or x.dtype == torch.bool:
            raise InputError(f"{name}: expected integers, got {x.dtype}")
        return x
    if spec.kind == "float" and not x.dtype.is_floating_point:
        return x.to(torch.get_default_dtype())
    return x


class _Rows:
    """What Rollouts and Policy share: named tensors that can be indexed by row, moved, and replaced together."""

    _specs: Mapping[str, FieldSpec]

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields that are present, by name."""
        return {n: v for n in self._specs if (v := getattr(self, n, None)) is not None}

    def __getitem__(self, rows):
        """The same batch with `rows` only: an index tensor, a list, a bool mask or a slice."""
        rows = _as_index(rows)
        return dataclasses.replace(self, **{n: v[rows] for n, v in self.tensors().items()})  # type: ignore[type-var]

    def replace(self, **changes):
        """A copy with some fields replaced; shapes are checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to(self, *args, **kwargs):
        """A copy with every tensor on another device; nothing changes its dtype."""
        device = torch.empty(0).to(*args, **kwargs).device
        return dataclasses.replace(self, **{n: v.to(device) for n, v in self.tensors().items()})  # type: ignore[type-var]


def _as_index(rows):
    return torch.as_tensor(rows) if isinstance(rows, list | tuple | range) else rows


@dataclass(frozen=True, eq=False)
class Rollouts(_Rows):
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
    token_rewards           [B,T]            rewards per token, where a method has them
    answer                  [B] int          identity of the extracted answer, -1 unparsable
    baseline                [B]              reward of the greedy response (ReMax)
    logp_sampler            [B,T]            log μ, the behaviour policy that sampled, however stale
    logp_old                [B,T]            log π_old, scored by the trainer before this batch's updates; absent when
                                             one optimizer step consumes the batch (π_old is then π_θ, detached)
    logp_ref, values_old    [B,T]            reference policy; critic before the update
    logp_guided             [B,T]            under the privileged prompt that sampled it
    logp_prox               [B,T]            an EWMA proximal policy
    logp_source             [B]              mean log-prob per token under the other model that wrote the response, in
                                             that model's tokens; NaN: the response is the policy's own (GRAFT)
    topk_ids                [B,T,K] int      K likeliest tokens of the sampler or of π_old; with their log-probs in
                                             topk_logp_sampler, topk_logp_old [B,T,K]
    support_ids             [B,T,K] int      ids that top-k / top-p sampling kept, -1 padded (absent: whole vocabulary)
    prompt_mask             [B,T] bool       prompt positions that a stage scores
    policy_version          [B,T] int        which weights produced each token
    origin                  [B] int          0 on-policy, 1 replayed, 2 expert, 3 rephrased
    truncated               [B] bool         the response hit the length limit
    turn                    [B,T] int        turn number
    routes, router_logp_old [B,T,L,K]        experts chosen while sampling, and their old log-scores
    reward_parts            name -> [B]      named components of the reward
    ======================= ================ ===========================================================================

    Floating fields keep the dtype they came with. Entries at masked positions may hold anything, NaN included.
    Raises `InputError` if a shape, kind or 0/1 mask is wrong, or if ``mask[:, 0]`` holds a true entry.
    """

    mask: Tensor
    group: Tensor
    rewards: Tensor
    tokens: Tensor | None = None
    prompt_id: Tensor | None = None
    token_rewards: Tensor | None = None
    answer: Tensor | None = None
    baseline: Tensor | None = None
    logp_sampler: Tensor | None = None
    logp_old: Tensor | None = None
    logp_ref: Tensor | None = None
    values_old: Tensor | None = None
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
    truncated: Tensor | None = None
    turn: Tensor | None = None
    routes: Tensor | None = None
    router_logp_old: Tensor | None = None
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)

    _specs = ROLLOUT_FIELDS

    def __post_init__(self) -> None:
        mask = self.mask if isinstance(self.mask, Tensor) else torch.as_tensor(self.mask)
        if mask.dim() != 2:
            raise InputError(f"mask: expected shape [B,T], got {list(mask.shape)}")
        batch, width = mask.shape
        for name, value in self.tensors().items():
            object.__setattr__(self, name, _checked(name, value, ROLLOUT_FIELDS[name], batch, width))
        parts = {n: _checked(f"reward_parts.{n}", v, FieldSpec("B", "float"), batch, width)
                 for n, v in self.reward_parts.items()}  # fmt: skip
        object.__setattr__(self, "reward_parts", parts)
        if width and bool(self.mask[:, 0].any()):
            raise InputError(
                "mask: position 0 is trainable, but no token precedes it; put the prompt (or one masked column) first"
            )

    def __len__(self) -> int:
        return self.mask.shape[0]

    def __getitem__(self, rows):
        rows = _as_index(rows)
        parts = {n: v[rows] for n, v in self.reward_parts.items()}
        return dataclasses.replace(self, reward_parts=parts, **{n: v[rows] for n, v in self.tensors().items()})

    def to(self, *args, **kwargs):
        device = torch.empty(0).to(*args, **kwargs).device
        parts = {n: v.to(device) for n, v in self.reward_parts.items()}
        return dataclasses.replace(self, reward_parts=parts, **{n: v.to(device) for n, v in self.tensors().items()})


@dataclass(frozen=True, eq=False)
class Policy(_Rows):
    """What the policy being optimised says about the rollouts' tokens. ``logp`` [B,T] carries the gradient.

    Optional: ``entropy``, ``values`` [B,T]; ``topk_logp`` [B,T,K] at the ids in ``rollouts.topk_ids``; ``kl_ref`` and
    ``kl_sampler`` [B,T], full-vocabulary divergences; ``router_logp`` [B,T,L,K] at the experts in ``rollouts.routes``.
    """

    logp: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    topk_logp: Tensor | None = None
    kl_ref: Tensor | None = None
    kl_sampler: Tensor | None = None
    router_logp: Tensor | None = None

    _specs = POLICY_FIELDS

    def __post_init__(self) -> None:
        if not isinstance(self.logp, Tensor) or self.logp.dim() != 2:
            raise InputError("policy.logp: expected a tensor of shape [B,T]")
        batch, width = self.logp.shape
        for name, value in self.tensors().items():
            object.__setattr__(self, name, _checked(f"policy.{name}", value, POLICY_FIELDS[name], batch, width))

    def __len__(self) -> int:
        return self.logp.shape[0]

    def detach(self) -> Policy:
        """The same numbers without their graph."""
        return dataclasses.replace(self, **{n: v.detach() for n, v in self.tensors().items()})


@dataclass(frozen=True)
class Totals:
    """Counts over one whole optimizer minibatch, all ranks, after selection and weights. Denominators come from here.

    ``kept`` means trainable and of weight > 0. ``sequences`` counts every selected rollout, fully masked ones too;
    ``kept_sequences`` those with a kept token. ``group_tokens`` and ``group_kept_tokens`` [B] give, on each row, the
    trainable and kept tokens of the row's group. ``weight_sum`` is the sum of the weights. All are 0-d or [B] tensors
    in the dtype of the advantages.
    """

    tokens: Tensor
    kept_tokens: Tensor
    weight_sum: Tensor
    sequences: Tensor
    kept_sequences: Tensor
    groups: Tensor
    group_tokens: Tensor
    group_kept_tokens: Tensor

    def rows(self, index) -> Totals:
        """The same global counts for a subset of rows."""
        return dataclasses.replace(
            self, group_tokens=self.group_tokens[index], group_kept_tokens=self.group_kept_tokens[index]
        )


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

    def __getitem__(self, rows) -> Prepared:
        """One minibatch of the prepared batch."""
        rows = _as_index(rows)
        cut = {n: (None if (v := getattr(self, n)) is None else v[rows])
               for n in ("advantages", "selected", "shaped", "group_size", "returns")}  # fmt: skip
        return dataclasses.replace(self, rollouts=self.rollouts[rows], **cut)  # type: ignore[arg-type]


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

    def __getitem__(self, rows) -> Batch:
        """One microbatch: its rows, the whole minibatch's totals."""
        rows = _as_index(rows)
        part = self.prepared[rows]
        return Batch(
            prepared=part,
            advantages=self.advantages[rows],
            weights=None if self.weights is None else self.weights[rows],
            pending=self.pending,
            totals=self.totals.rows(rows),
            extra={k: (own[rows], totals.rows(rows)) for k, (own, totals) in self.extra.items()},
            whole=self.whole and len(part) == len(self),
        )


@dataclass(frozen=True, eq=False)
class Loss:
    """A microbatch's share of the minibatch loss: already divided by the minibatch's totals, so shares add up.

    ``loss`` is a scalar with a graph to the policy's fields. ``weights`` [B,T] are the detached weights that were used.
    ``sums`` maps a metric's name to (sum, count), which add up over microbatches and ranks; ``extremes`` to a running
    maximum. Both are empty when the caller asked for no metrics.
    """

    loss: Tensor
    weights: Tensor
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    extremes: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Result:
    """What `evaluate` returns: ``coefficients`` [B,T] is d loss / d logp; ``gradients`` holds the same
    for every other differentiable field of Policy that the algorithm read."""

    loss: Tensor
    coefficients: Tensor
    advantages: Tensor
    weights: Tensor
    metrics: dict[str, float]
    state: Any
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
