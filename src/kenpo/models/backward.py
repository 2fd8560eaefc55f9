"""From coefficients to gradients: the head walks over the hidden states of a pass in chunks, each with its terms.

`fused_linear_logprob` makes a chunk's logits once; its terms go to the caller, who tells d loss / d term for whole
rollouts, and three matrix products are all that the head costs. Where that is not possible, or not worth it, the same
numbers come from autograd through the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenpo.models.head import FEW_LOGITS, Head
from kenpo.models.terms import OF_THE_VOCABULARY, Forward, scalar_terms, terms_of
from kenpo.models.value_head import SCALARS
from kenpo.ops.fused_logprob import Gains, chunk_positions, fused_linear_logprob
from kenpo.ops.linear_logprob import Terms, Transform, linear_logprob
from kenpo.types import Policy, Rollouts

#: (rows, policy [rows,T], measure) -> d loss / d field [rows,T] by name. ``measure`` is true once for each row.
Coefficients = Callable[[slice, Policy, bool], Mapping[str, Tensor]]


class Piece(NamedTuple):
    """Rollouts handled together: batch ``rows``, and the ``sizes`` of their chunks in positions (several: one unit
    that does not fit a chunk)."""

    rows: slice
    sizes: tuple[int, ...]


def backward(
    made: Forward,
    rollouts: Rollouts,
    coefficients: Coefficients,
    temperature: float,
    want: frozenset[str],
    *,
    divisible: bool = False,
    units: Sequence[int] | None = None,
    chunk: int | None = None,
) -> None:
    """Add to ``.grad`` the gradient of a loss whose derivatives in the terms of `made` the caller tells.

    See `Scorer.backward`, which this is the second half of.
    """
    head = _fusible(made, want, chunk is not None)
    if head is None:
        policy = terms_of(made, rollouts, temperature, want)
        _back_propagate(policy, coefficients(slice(0, len(rollouts)), policy.detach(), True))
        return
    states, ends = _leaf(made.states), None if made.ends is None else _leaf(made.ends)
    with torch.enable_grad():
        scalars = scalar_terms(made, states, ends, rollouts, want)
    caller = _WithScalars(coefficients, scalars)
    d_states = head_backward(
        made, head, rollouts, caller, temperature, want, divisible=divisible, units=units, chunk=chunk
    )
    _back_propagate(Policy(**scalars) if scalars else None, caller.gains)
    total = d_states if states.grad is None else d_states + states.grad
    grads = [(made.states, total), (made.ends, None if ends is None else ends.grad)]
    pairs = [(x, g) for x, g in grads if x is not None and g is not None and x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


class _WithScalars:
    """Hands the caller the scalar heads' terms beside a chunk's, and keeps the gradients that come back for them."""

    def __init__(self, coefficients: Coefficients, scalars: Mapping[str, Tensor]) -> None:
        self.coefficients = coefficients
        self.terms = {n: v.detach() for n, v in scalars.items()}
        self.gains = {n: torch.zeros_like(v) for n, v in self.terms.items()}

    def __call__(self, rows: slice, policy: Policy, measure: bool) -> Mapping[str, Tensor]:
        if not self.terms:
            return self.coefficients(rows, policy, measure)
        found = self.coefficients(rows, policy.replace(**{n: v[rows] for n, v in self.terms.items()}), measure)
        for name, gains in self.gains.items():
            if name in found:
                gains[rows] = found[name].to(gains)
        return {n: g for n, g in found.items() if n not in SCALARS}


def head_backward(
    made: Forward,
    head: tuple[Tensor, Tensor | None, Transform],
    rollouts: Rollouts,
    coefficients: Coefficients,
    temperature: float,
    want: frozenset[str] = frozenset({"logp"}),
    *,
    divisible: bool = False,
    units: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The part of `backward` that is the vocabulary head's: adds to its ``.grad``, returns the states' gradient."""
    weight, bias, after = head
    pieces = cut(made.rows.counts, chunk or default_chunk(weight), units)
    transform = after._replace(temperature=temperature)
    walk = _Walk(made, rollouts, coefficients, pieces, want, divisible, weight, bias, transform)
    d_weight, d_bias = _accumulator(weight), None if bias is None else _accumulator(bias)
    d_states = fused_linear_logprob(
        made.states.detach(), weight.detach(), made.rows.target, [n for p in pieces for n in p.sizes], walk.gains,
        bias=None if bias is None else bias.detach(), transform=transform, entropy="entropy" in want, ids=made.topk,
        d_weight=d_weight, d_bias=d_bias, checked=True,
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


def head_chunk(head: Head | None) -> int | None:
    """Positions that a head takes at a time, or None where its logits are made whole."""
    linear = None if head is None else head.linear()
    return None if linear is None or not linear[0].is_leaf else default_chunk(linear[0])


def cut(counts: Sequence[int], chunk: int, units: Sequence[int] | None = None) -> list[Piece]:
    """Rollouts with `counts` positions in order, as many to a piece as fill a chunk; a longer one by itself, in chunks.

    `units` (None: each by itself) are the numbers of rollouts that have to stay together, in order.

    >>> [tuple(p.sizes) for p in cut([2, 0, 1, 7, 3], 3)]
    [(3,), (3, 3, 1), (3,)]
    >>> [(p.rows.stop, p.sizes) for p in cut([2, 2, 1, 1], 5, [2, 2])]
    [(2, (4,)), (4, (2,))]
    """
    pieces: list[Piece] = []
    start = total = row = 0
    for size in units if units is not None else [1] * len(counts):
        n = sum(counts[row : row + size])
        if total + n > chunk and row > start:
            pieces.append(Piece(slice(start, row), (total,)))
            start, total = row, 0
        total += n
        row += size
        if n > chunk:
            sizes = [chunk] * (n // chunk) + [n % chunk] * (n % chunk > 0)
            pieces.append(Piece(slice(start, row), tuple(sizes)))
            start, total = row, 0
    if start < len(counts):
        pieces.append(Piece(slice(start, len(counts)), (total,)))
    return pieces


class _Walk:
    """Turns the terms of chunks into upstream gradients, whole rollouts at a time where the caller needs them."""

    def __init__(
        self,
        made: Forward,
        rollouts: Rollouts,
        coefficients: Coefficients,
        pieces: Sequence[Piece],
        want: frozenset[str],
        divisible: bool,
        weight: Tensor,
        bias: Tensor | None,
        transform: Transform,
    ) -> None:
        self.made, self.rollouts, self.coefficients, self.want = made, rollouts, coefficients, want
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
            self.known = dict(self.coefficients(piece.rows, Policy(**self.fields), last))
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
        """The coefficients of rollouts longer than a chunk, from a pass over them of their own."""
        at = slice(start, start + sum(piece.sizes))
        made = self.made
        terms = linear_logprob(
            made.states[at].detach(), self.weight.detach(), made.rows.target[at],
            bias=None if self.bias is None else self.bias.detach(), transform=self.transform,
            entropy="entropy" in self.want, ids=None if made.topk is None else made.topk[at], checked=True,
        )  # fmt: skip
        self._fill(piece, made.rows.row[at] - piece.rows.start, made.rows.column[at], terms)
        self.known = dict(self.coefficients(piece.rows, Policy(**self.fields), True))


def _named(terms: Terms) -> dict[str, Tensor]:
    """The terms under the names of Policy's fields."""
    named = {"logp": terms.logp, "entropy": terms.entropy, "topk_logp": terms.ids_logp}
    return {n: v for n, v in named.items() if v is not None}


_COMPARED = frozenset({"kl_ref", "kl_teacher", "kl_sampler"})


def _fusible(made: Forward, want: frozenset[str], forced: bool) -> tuple[Tensor, Tensor | None, Transform] | None:
    """The head's parts if its chunks can be fused; `forced`: however few the logits."""
    if made.head is None or made.support is not None or want & _COMPARED or not want & OF_THE_VOCABULARY:
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


def _back_propagate(policy: Policy | None, grads: Mapping[str, Any]) -> None:
    """Back-propagate given coefficients through the policy's fields; a field without graph is left out."""
    pairs = [(getattr(policy, name), grad) for name, grad in grads.items()] if policy is not None else []
    pairs = [(value, grad.to(value)) for value, grad in pairs if value is not None and value.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
