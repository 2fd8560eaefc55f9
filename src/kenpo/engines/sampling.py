"""Drawing tokens from logits: temperature, top-k, top-p, inverse distribution function; and what a text stop needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kenpo.engines.base import SamplingOptions
from kenpo.engines.text import decode, decode_all
from kenpo.models.head import tempered

_SLACK = 1e-6  # mass by which a top-p set may fall short, so that 0.5 + 0.3 reaches 0.8 in every precision


class Draw(NamedTuple):
    """Ids and log-probs [R] that were drawn; ``support`` [R,K] the ids kept, -1 padded, or None; ``bad`` [R] NaN;
    ``top`` the likeliest ids [R,K], -1 padded, and their log-probs, where they are recorded."""

    ids: Tensor
    logp: Tensor
    support: Tensor | None
    bad: Tensor
    top: tuple[Tensor, Tensor] | None = None

    def where(self, keep: Tensor, other: Draw) -> Draw:
        """This draw in the rows of ``keep`` [R], the other's ids and log-probs elsewhere."""
        ids, logp = torch.where(keep, self.ids, other.ids), torch.where(keep, self.logp, other.logp)
        return Draw(ids, logp, self.support, torch.where(keep, self.bad, other.bad), self.top)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0,1) as a float64 tensor [R, count]: row r is a function of ``seeds[r]`` alone (all 64 bits of it).

    A counter-based generator (splitmix64), so that all rows are made at once. torch's own CPU generator reads 32 bits
    of a seed only.
    """
    start = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64))
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(start[:, None] + steps[None, :])
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of splitmix64."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: Tensor, u: Tensor, options: SamplingOptions) -> Draw:
    """One token per row from logits [R,V] and uniforms [R]; its log-prob is that of the distribution it came from."""
    logp = tempered(logits, options.temperature).log_softmax(-1)
    bad = logp.isnan().any(-1)
    if not options.truncates:
        ids = _invert(logp, u)
        return Draw(ids, _at(logp, ids), None, bad, _likeliest(logp, None, options.top_logprobs))
    values, order = _kept(logp, options)
    place = _invert(values, u)
    support = order.masked_fill(values == -torch.inf, -1)
    return Draw(_at(order, place), _at(values, place), support, bad, _likeliest(values, order, options.top_logprobs))


def take_best(logits: Tensor, options: SamplingOptions) -> Draw:
    """The likeliest token per row; its log-prob is under the temperature and the whole vocabulary."""
    logp = tempered(logits, options.temperature).log_softmax(-1)
    ids = logp.argmax(-1)
    bad = logp.isnan().any(-1)
    return Draw(ids, _at(logp, ids), None, bad, _likeliest(logp, None, options.top_logprobs))


def _likeliest(logp: Tensor, ids: Tensor | None, count: int) -> tuple[Tensor, Tensor] | None:
    """The `count` likeliest entries of log-probs [R,V] and their ids (of `ids` [R,V], else their places)."""
    if not count:
        return None
    values, places = logp.topk(min(count, logp.shape[-1]), dim=-1)
    found = places if ids is None else ids.gather(-1, places)
    absent = values == -torch.inf
    return found.masked_fill(absent, -1), values.masked_fill(absent, 0.0)


def _kept(logp: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """Log-probs [R,K] of the kept ids, likeliest first, renormalised, -inf where not kept; and the ids."""
    width = logp.shape[-1]
    count = min(options.top_k, width) if options.top_k else width
    values, order = logp.sort(dim=-1, descending=True, stable=True)
    values, order = values[:, :count].log_softmax(-1), order[:, :count]
    if options.top_p < 1:
        before = values.double().exp().cumsum(-1).roll(1, -1)
        before[:, 0] = 0.0
        values = values.masked_fill(before >= options.top_p - _SLACK, -torch.inf)
        values = torch.cat([values[:, :1].masked_fill(values[:, :1] == -torch.inf, 0.0), values[:, 1:]], -1)
        longest = int((values > -torch.inf).sum(-1).max()) if len(values) else 0
        values, order = values[:, :longest].log_softmax(-1), order[:, :longest]
    return values, order


def _invert(logp: Tensor, u: Tensor) -> Tensor:
    """The first place whose cumulative probability exceeds u: never a place of probability 0."""
    total = logp.double().exp().cumsum(-1)
    mass = total[:, -1:]
    goal = torch.minimum(u.to(total)[:, None] * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    return torch.searchsorted(total, goal, right=True).squeeze(-1).clamp_max(logp.shape[-1] - 1)


def _at(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids[:, None]).squeeze(-1)


class StopStrings:
    """Finds stop strings in responses that grow token by token, across token borders.

    Only the end of a response is decoded at each step; how much is measured in characters of text, so that tokens that
    decode to nothing don't shorten the view.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], rows: int) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.view = max(map(len, self.stop)) + 16  # some characters more: a decoded tail may begin in mid-character
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.start = [0] * rows

    def push(self, rows: Sequence[int], ids: Sequence[int]) -> list[bool]:
        """Appends one token to each of `rows`; says for each whether its text now holds a stop string."""
        for row, token in zip(rows, ids, strict=True):
            self.tokens[row].append(token)
        tails = [self.tokens[row][self.start[row] :] for row in rows]
        return [self._check(row, text) for row, text in zip(rows, decode_all(self.tokenizer, tails), strict=True)]

    def _check(self, row: int, text: str) -> bool:
        if any(s in text for s in self.stop) and cut_text(decode(self.tokenizer, self.tokens[row]), self.stop)[1]:
            return True
        if len(text) > 4 * self.view:
            middle = self.start[row] + (len(self.tokens[row]) - self.start[row]) // 2
            if len(decode(self.tokenizer, self.tokens[row][middle:])) >= self.view:
                self.start[row] = middle
        return False


def cut_text(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, and whether there was one."""
    places = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(places)], True) if places else (text, False)
