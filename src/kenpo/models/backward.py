"""Model and head forward and backward in one go, for whoever can tell d loss / d term from the terms of whole rollouts.

The hidden states are computed once with their graph. The head then walks over them in chunks (`fused_linear_logprob`:
three matrix products) and the rollouts of a chunk get their coefficients at once; what is left is one backward pass
from the gradient of the hidden states. Where that is not possible, the same numbers come through `policy_terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.models.head import FEW_LOGITS, find_head
from kenpo.models.policy import Forward, forward, nothing, terms_of
from kenpo.ops.fused_logprob import Gains, chunk_positions, fused_linear_logprob
from kenpo.ops.linear_logprob import Terms, Transform, linear_logprob
from kenpo.types import Policy, Rollouts

#: (rows, policy [rows,T], measure) -> d loss / d field [rows,T] by name. ``measure`` is true once for each row.
Shares = Callable[[slice, Policy, bool], Mapping[str, Tensor]]


class Piece(NamedTuple):
    """Rollouts handled together: batch ``rows``, and the ``sizes`` of their chunks in positions (several: one rollout
    that does not fit a chunk)."""

    rows: slice
    sizes: tuple[int, ...]


def policy_backward(
    model: Any,
    rollouts: Rollouts,
    shares: Shares,
    *,
    temperature: float,
    want: frozenset[str] = frozenset(),
    reference: Any = None,
    packing: str = "auto",
    divisible: bool = False,
    chunk: int | None = None,
) -> None:
    """Add to ``.grad`` the gradient of a loss whose derivatives in the policy's terms `shares` tells.

    `shares` gets slices of the batch's rows with their terms (without graph, on the model's device), every row in
    exactly one call with ``measure`` true. A rollout longer than `chunk` positions (default: by the logits' bytes) is
    scored first and its chunks are made again (four products); if `divisible`, `shares` is asked for each of its chunks
    instead, with zeros in the terms not yet known: right where a token's coefficient depends on that token alone.

    Same arguments and errors as `policy_terms` otherwise, and the same gradient as its terms' backward pass, up to
    rounding. Falls back on that one for few logits, ``support_ids``, ``kl_ref``, and a head that is not a bare Linear.
    """
    made = forward(model, rollouts, temperature=temperature, want=want, reference=reference, packing=packing)
    head = None if made is None else _fusible(made, want, chunk is not None)
    if made is None or head is None:
        policy = nothing(model, rollouts, want) if made is None else terms_of(made, rollouts, temperature, want)
        _back_propagate(policy, shares(slice(0, len(rollouts)), policy.detach(), True))
        return
    d_states = head_backward(made, head, rollouts, shares, temperature, want, divisible, chunk)
    if made.states.requires_grad:
        made.states.backward(d_states)


def head_backward(
    made: Forward,
    head: tuple[Tensor, Tensor | None, Transform],
    rollouts: Rollouts,
    shares: Shares,
    temperature: float,
    want: frozenset[str] = frozenset(),
    divisible: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """The part of `policy_backward` that is the head's: adds to its ``.grad``, returns the hidden states' gradient."""
    weight, bias, after = head
    pieces = cut(torch.bincount(made.rows.row, minlength=len(rollouts)).tolist(), chunk or default_chunk(weight))
    transform = after._replace(temperature=temperature)
    walk = _Walk(made, rollouts, shares, pieces, want, divisible, weight, bias, transform)
    d_weight, d_bias = _accumulator(weight), None if bias is None else _accumulator(bias)
    d_states = fused_linear_logprob(
        made.states.detach(), weight.detach(), made.rows.target, [n for p in pieces for n in p.sizes], walk.gains,
        bias=None if bias is None else bias.detach(), transform=transform, entropy="entropy" in want, ids=made.topk,
        d_weight=d_weight, d_bias=d_bias,
    )  # fmt: skip
    _settle(weight, d_weight)
    if bias is not None:
        _settle(bias, d_bias)
    return d_states.to(made.states.dtype)


def default_chunk(weight: Tensor) -> int:
    """Positions whose logits fill a chunk, in the dtype that the head's product has here and now."""
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return chunk_positions(weight.shape[0], dtype.itemsize, kind)


def head_chunk(model: Any) -> int | None:
    """Positions that the model's head takes at a time, or None where its logits are made whole."""
    head = find_head(model)
    linear = None if head is None else head.linear()
    return None if linear is None or not linear[0].is_leaf else default_chunk(linear[0])


def cut(counts: Sequence[int], chunk: int) -> list[Piece]:
    """Rollouts with `counts` positions in order, as many to a piece as fill a chunk; a longer one by itself, in chunks.

    >>> [tuple(p.sizes) for p in cut([2, 0, 1, 7, 3], 3)]
    [(3,), (3, 3, 1), (3,)]
    """
    pieces: list[Piece] = []
    start = total = 0
    for row, n in enumerate(counts):
        if total + n > chunk and row > start:
            pieces.append(Piece(slice(start, row), (total,)))
            start, total = row, 0
        total += n
        if n > chunk:
            sizes = [chunk] * (n // chunk) + [n % chunk] * (n % chunk > 0)
            pieces.append(Piece(slice(row, row + 1), tuple(sizes)))
            start, total = row + 1, 0
    if start < len(counts):
        pieces.append(Piece(slice(start, len(counts)), (total,)))
    return pieces


class _Walk:
    """Turns the terms of chunks into upstream gradients, whole rollouts at a time where the callback needs them."""

    def __init__(
        self,
        made: Forward,
        rollouts: Rollouts,
        shares: Shares,
        pieces: Sequence[Piece],
        want: frozenset[str],
        divisible: bool,
        weight: Tensor,
        bias: Tensor | None,
        transform: Transform,
    ) -> None:
        self.made, self.rollouts, self.shares, self.want = made, rollouts, shares, want
        self.divisible, self.weight, self.bias, self.transform = divisible, weight, bias, transform
        self.chunks = self._chunks(pieces)
        self.known: dict[str, Tensor] = {}  # of a rollout in several chunks: its terms, or its coefficients
        self.fields: dict[str, Tensor] = {}

    @staticmethod
    def _chunks(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, bool, bool]]:
        for piece in pieces:
            for i in range(len(piece.sizes)):
                yield piece, i == 0, i == len(piece.sizes) - 1

    def gains(self, at: slice, terms: Terms) -> Gains:
        """The chunk's upstream gradients."""
        piece, first, last = next(self.chunks)
        row, column = self.made.rows.row[at] - piece.rows.start, self.made.rows.column[at]
        if first:
            self.fields = {}
        if first and not last and not self.divisible:
            self._score(piece, at.start)
        elif first or self.divisible:
            self._fill(piece, row, column, terms)
            self.known = dict(self.shares(piece.rows, Policy(**self.fields), last))
        picked = {n: g.to(terms.logp)[row, column] for n, g in self._known_as(terms).items()}
        return Gains(picked.get("logp"), picked.get("entropy"), picked.get("topk_logp"))

    def _known_as(self, terms: Terms) -> dict[str, Tensor]:
        return {n: self.known[n] for n in _named(terms) if n in self.known}

    def _fill(self, piece: Piece, row: Tensor, column: Tensor, terms: Terms) -> None:
        """Put terms at their places in the rollouts; what is not known yet is 0."""
        shape = (piece.rows.stop - piece.rows.start, self.rollouts.mask.shape[1])
        for name, value in _named(terms).items():
            field = self.fields.setdefault(name, value.new_zeros((*shape, *value.shape[1:])))
            field[row, column] = value

    def _score(self, piece: Piece, start: int) -> None:
        """The coefficients of a rollout longer than a chunk, from a pass over it of its own."""
        at = slice(start, start + sum(piece.sizes))
        made = self.made
        terms = linear_logprob(
            made.states[at].detach(), self.weight.detach(), made.rows.target[at],
            bias=None if self.bias is None else self.bias.detach(), transform=self.transform,
            entropy="entropy" in self.want, ids=None if made.topk is None else made.topk[at],
        )  # fmt: skip
        self._fill(piece, made.rows.row[at] - piece.rows.start, made.rows.column[at], terms)
        self.known = dict(self.shares(piece.rows, Policy(**self.fields), True))


def _named(terms: Terms) -> dict[str, Tensor]:
    """The terms under the names of Policy's fields."""
    named = {"logp": terms.logp, "entropy": terms.entropy, "topk_logp": terms.ids_logp}
    return {n: v for n, v in named.items() if v is not None}


def _fusible(made: Forward, want: frozenset[str], forced: bool) -> tuple[Tensor, Tensor | None, Transform] | None:
    """The head's parts if its chunks can be fused; `forced`: however few the logits."""
    if made.head is None or made.support is not None or "kl_ref" in want:
        return None
    linear = made.head.linear()
    if linear is None or not linear[0].is_leaf:
        return None
    few = len(made.states) * linear[0].shape[0] <= FEW_LOGITS
    return None if few and not forced else linear


def _accumulator(parameter: Tensor) -> Tensor | None:
    """Where the chunks' gradients add up: ``.grad`` itself, or float32 in its place for a parameter in bf16."""
    if not parameter.requires_grad:
        return None
    if parameter.dtype not in (torch.float32, torch.float64):
        return torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _settle(parameter: Tensor, total: Tensor | None) -> None:
    """Move what an accumulator of its own has gathered into ``.grad``."""
    if total is None or total is parameter.grad:
        return
    if parameter.grad is None:
        parameter.grad = total.to(parameter.dtype)
    else:
        parameter.grad.add_(total)


def _back_propagate(policy: Policy, grads: Mapping[str, Tensor]) -> None:
    """Back-propagate given coefficients through the policy's fields; a field without graph is left out."""
    pairs = [(getattr(policy, name), grad) for name, grad in grads.items()]
    pairs = [(value, grad.to(value)) for value, grad in pairs if value is not None and value.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
