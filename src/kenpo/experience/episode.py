"""Episodes as rows for the objective: the one place where `Rollouts` are built."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kenpo.episode import Episode, Segment, given, prompt_key
from kenpo.errors import InputError
from kenpo.types import ROLLOUT_FIELDS, Rollouts

__all__ = ["Episode", "Row", "Segment", "answer_id", "build_rollouts", "given", "prompt_key"]


def answer_id(answer: str | None) -> int:
    """The identity of an extracted answer as `Rollouts.answer` holds it; -1 for none."""
    if answer is None:
        return -1
    return int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Row:
    """One episode and what is known of it as a whole.

    ``group`` numbers the rollouts compared together; ``reward`` NaN: no verdict; ``prompt_id`` is the problem's id;
    ``answer`` the extracted answer; ``parts`` named components of the reward; ``origin`` as in `Rollouts`. ``numbers``
    holds further fields of one number per row by their name in `Rollouts` (``baseline``, ``margin``, ``logp_source``).
    ``valid`` are the prompt's valid answers, ``shares`` their target shares.
    """

    episode: Episode
    group: int
    reward: float = math.nan
    prompt_id: int = -1
    answer: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    origin: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)
    valid: Sequence[str] = ()
    shares: Sequence[float] = ()


ALWAYS = frozenset({"tokens", "prompt_id", "prefix", "answer", "policy_version", "truncated", "logp_sampler"})


def build_rollouts(
    rows: Sequence[Row],
    *,
    also: Collection[str] = (),
    without: Collection[str] = (),
    contexts: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Rollouts:
    """`Rollouts` with each episode's tokens in order, padded with -1 on the right.

    The mask covers exactly what was sampled, the end-of-sequence token included; an episode cut at the limit has none.
    ``prefix`` is the prompt's identity, decided here once. ``also`` names further fields to fill: ``support_ids``,
    ``turn``, ``trajectory``, ``origin``, ``topk_ids`` and ``topk_logp_sampler``, ``routes``, and the names in
    ``numbers`` (NaN where a row has none); ``without`` names fields to leave out (``logp_sampler`` where nobody knows
    it); ``contexts`` names those of the episodes' contexts to take along. The choice of fields depends on these three
    alone, so that the batches of all ranks can be joined.
    Raises `InputError` for an episode that lacks what a field needs.
    """
    wanted = (ALWAYS | frozenset(also)) - frozenset(without)
    width = max((sum(len(s.ids) for s in row.episode.segments) for row in rows), default=0)
    tokens = torch.full((len(rows), width), -1, dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    per_token = {n: _Field(n, rows, tokens.shape, dtype) for n in sorted(wanted & _PER_TOKEN.keys())}
    for r, row in enumerate(rows):
        at = 0
        for segment in row.episode.segments:
            end = at + len(segment.ids)
            tokens[r, at:end] = torch.tensor(segment.ids, dtype=torch.int64)
            mask[r, at:end] = segment.sampled
            for filled in per_token.values():
                filled.write(r, at, end, segment)
            at = end
    ints: dict[str, list[int]] = {
        "prompt_id": [row.prompt_id for row in rows],
        "prefix": [row.episode.prompt_key for row in rows],
        "answer": [answer_id(row.answer) for row in rows],
        "trajectory": [row.episode.trajectory for row in rows],
        "origin": [row.origin for row in rows],
    }
    fields: dict[str, Tensor] = {n: torch.tensor(v, dtype=torch.int64) for n, v in ints.items() if n in wanted}
    if "truncated" in wanted:
        fields["truncated"] = torch.tensor([row.episode.truncated for row in rows], dtype=torch.bool)
    fields |= _targets(rows, wanted, dtype)
    if "prompt_mask" in wanted:
        fields["prompt_mask"] = _prompts(rows, tokens, mask)
    for name in sorted(wanted - ALWAYS - _PER_TOKEN.keys() - ints.keys() - fields.keys()):
        if name not in ROLLOUT_FIELDS or ROLLOUT_FIELDS[name].axes != "B":
            raise InputError(f"rollouts: {name!r} is not a field of one number per row")
        fields[name] = torch.tensor([row.numbers.get(name, math.nan) for row in rows], dtype=dtype)
    parts = {n: torch.full((len(rows),), math.nan, dtype=dtype) for row in rows for n in row.parts}
    for r, row in enumerate(rows):
        for name, value in row.parts.items():
            parts[name][r] = value
    return Rollouts(
        mask=mask,
        group=torch.tensor([row.group for row in rows], dtype=torch.int64),
        rewards=torch.tensor([row.reward for row in rows], dtype=dtype),
        tokens=tokens,
        reward_parts=parts,
        contexts=_contexts([row.episode.contexts for row in rows], contexts),
        **fields,
        **{n: filled.values for n, filled in per_token.items()},
    )


def _targets(rows: Sequence[Row], wanted: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """``target_ids`` [B,K], -1 padded, and ``target_prob`` [B,K], where they are wanted."""
    width = max((len(row.valid) for row in rows), default=0)
    ids = [[answer_id(v) for v in row.valid] + [-1] * (width - len(row.valid)) for row in rows]
    shares = [[*row.shares, *[0.0] * (width - len(row.shares))] for row in rows]
    made = {
        "target_ids": torch.tensor(ids, dtype=torch.int64).reshape(len(rows), width),
        "target_prob": torch.tensor(shares, dtype=dtype).reshape(len(rows), -1),
    }
    return {name: value for name, value in made.items() if name in wanted}


def _prompts(rows: Sequence[Row], tokens: Tensor, mask: Tensor) -> Tensor:
    """[B,T] bool: tokens before a row's first sampled one, but for its very first, which nothing predicts."""
    before = mask.cumsum(1) == 0
    before[:, :1] = False
    return before & (tokens >= 0) & mask.any(1, keepdim=True)


def _contexts(episodes: Sequence[Mapping[str, Sequence[int]]], names: Collection[str]) -> dict[str, Tensor]:
    """Each named context as [B,P] ids, -1 where an episode has none of that name."""
    made = {}
    for name in names:
        width = max((len(c.get(name, ())) for c in episodes), default=0)
        rows = [[*(ids := c.get(name, ())), *[-1] * (width - len(ids))] for c in episodes]
        made[name] = torch.tensor(rows, dtype=torch.int64).reshape(len(episodes), width)
    return made


# Field of Rollouts -> the segment's attribute that fills it.
_PER_TOKEN = {
    "logp_sampler": "logp", "policy_version": "version", "turn": "turn", "support_ids": "support",
    "topk_ids": "top_ids", "topk_logp_sampler": "top_logp", "routes": "routes",
}  # fmt: skip
_NEEDED = frozenset({"logp_sampler", "support_ids", "topk_ids", "topk_logp_sampler", "routes"})


class _Field:
    """One tensor with an entry per token, filled segment by segment."""

    def __init__(self, name: str, rows: Sequence[Row], shape: torch.Size, dtype: torch.dtype) -> None:
        self.name, spec, self.source = name, ROLLOUT_FIELDS[name], _PER_TOKEN[name]
        kinds = {"float": dtype, "int": torch.int32 if name == "policy_version" else torch.int64}
        pad = int(spec.pad) if spec.kind == "int" else spec.pad
        said = [x for row in rows for s in row.episode.sampled if (x := getattr(s, self.source)) is not None]
        inner: tuple[int, ...] = ()
        if name == "routes":
            inner = tuple(said[0].shape[1:]) if said else (0, 0)
        elif len(spec.axes) == 3:
            inner = (max((len(ids) for per in said for ids in per), default=1),)
        self.values = torch.full((*shape, *inner), pad, dtype=kinds[spec.kind])

    def write(self, row: int, start: int, end: int, segment: Segment) -> None:
        value = getattr(segment, self.source)
        if not segment.sampled:
            if self.name == "turn":
                self.values[row, start:end] = value
            return
        if value is None and self.name in _NEEDED:
            raise InputError(f"row {row}: a sampled segment has no {self.source}, which {self.name} is made of")
        if self.values.dim() == 3:  # the last axis is ragged
            for t, entries in enumerate(value, start):
                self.values[row, t, : len(entries)] = torch.tensor(entries, dtype=self.values.dtype)
        else:
            self.values[row, start:end] = torch.as_tensor(value, dtype=self.values.dtype)
