"""Why a sampler's log-probs differ from the trainer's: known causes, each tried on the rows that differ."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kenpo.models.lora import is_adapted
from kenpo.types import Rollouts

BLOCKS = (16, 32, 64, 128)  # tokens of a prefix cache's block
TEMPERATURES = tuple(x / 20 for x in range(2, 41))
UNKNOWN = (
    "No known cause that can be tried gives the sampler's numbers; if the first tokens of the responses are "
    "worst, it may have read another prompt (another tokenizer or template)."
)


class Suspects:
    """Tries each cause on a row: what would the sampler have said? ``remember`` keeps the weights of the moment."""

    def __init__(self, top_p: float = 1.0) -> None:
        self.top_p = top_p
        self.before: dict[str, Tensor] = {}

    def remember(self, model: Any) -> None:
        """Keep a copy of the trained weights: at the next batch they are those before the update."""
        self.before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def cause(self, model: Any, rows: Rollouts, temperature: float, bound: float) -> str:
        """One sentence: the cause under which every one of `rows` fits within `bound`."""
        read = [_Row(rows, i) for i in range(len(rows))]

        def fits(logp: Callable[[_Row], Tensor]) -> bool:
            return all(_near(logp(row), row.said, bound) for row in read)

        now = functools.partial(_at, model, temperature)

        if self.top_p < 1 and all(_unnormalised(now(row), row.said, self.top_p, bound) for row in read):
            return "Cause: top-p without renormalising: the sampler's log-probs are those of the whole vocabulary."
        others = [t for t in TEMPERATURES if abs(t - temperature) > 1e-9]
        other = next((t for t in others if fits(functools.partial(_at, model, t))), None)
        if other is not None:
            return f"Cause: another temperature: the sampler's log-probs fit {other:g}, not {temperature:g}."
        if not self.before:
            return UNKNOWN
        if is_adapted(model):
            with _holding(model, {n: torch.zeros_like(t) for n, t in self.before.items() if ".lora_B" in n}):
                if fits(now):
                    return "Cause: an adapter not sent: the sampler has the weights without it."
        with _holding(model, self.before):
            if fits(now):
                return "Cause: stale weights: the sampler has those before the last update."
        experts = {n: t for n, t in self.before.items() if ".experts." in n}
        if experts:
            with _holding(model, experts):
                if fits(now):
                    return "Cause: experts left behind: the sampler has new weights but for its experts."
        with _old_head(model, self.before) as tied:
            if tied is not None and fits(now):
                which = "a tied head" if tied else "a head"
                return f"Cause: {which} left behind: the sampler's head has the weights before the last update."
        if all(self._cached(model, row, temperature, bound) for row in read):
            return "Cause: prefix cache not reset: the beginning of the prompt was read by the weights before."
        if all(self._in_flight(model, row, temperature, bound) for row in read):
            return "Cause: a reload while requests were in flight: responses begin under the weights before."
        return UNKNOWN

    def _cached(self, model: Any, row: _Row, temperature: float, bound: float) -> bool:
        """Whether a part of the prompt, whole blocks of it, was read by the weights before."""
        ends = {(row.start - 1) // block * block for block in BLOCKS} - {0}
        return any(self._split(model, row, end, temperature, bound) for end in sorted(ends, reverse=True))

    def _in_flight(self, model: Any, row: _Row, temperature: float, bound: float) -> bool:
        """Whether the weights changed within the response."""
        return any(self._split(model, row, end, temperature, bound) for end in range(row.start, row.ids.shape[1]))

    def _split(self, model: Any, row: _Row, end: int, temperature: float, bound: float) -> bool:
        """Whether the row fits with its first `end` tokens read by the weights before, the rest by the present ones."""
        with _holding(model, self.before):
            first = model(row.ids[:, :end], use_cache=True)
        rest = model(row.ids[:, end:], use_cache=True, **{_cache_name(model): first.past_key_values})
        logp = row.logp(torch.cat([first.logits[0], rest.logits[0]]), temperature)
        return _near(logp, row.said, bound)


class _Row:
    """One row without padding: its ids [1,n], the sampled positions, what the sampler said of them, their supports."""

    def __init__(self, rows: Rollouts, index: int) -> None:
        assert rows.tokens is not None
        assert rows.logp_sampler is not None
        real = rows.tokens[index] >= 0
        self.ids = rows.tokens[index][real].long()[None]
        self.at = rows.mask[index][real].nonzero()[:, 0]
        self.start = int(self.at[0])
        self.said = rows.logp_sampler[index][rows.mask[index]].double()
        self.support = None if rows.support_ids is None else rows.support_ids[index][rows.mask[index]].long()

    def logp(self, logits: Tensor, temperature: float) -> Tensor:
        """log π of the sampled ids [k] from the logits [n,V] at each position, over their supports."""
        x = (
            logits[self.at - 1].double() if logits.dtype == torch.float64 else logits[self.at - 1].float()
        ) / temperature
        chosen = x.gather(1, self.ids[0, self.at].to(x.device)[:, None])[:, 0]
        if self.support is not None:
            kept = self.support.to(x.device)
            x = x.gather(1, kept.clamp(min=0)).masked_fill(kept < 0, -torch.inf)
        return (chosen - x.logsumexp(1)).double().cpu()


def _at(model: Any, temperature: float, row: _Row) -> Tensor:
    """log π of the row's sampled tokens under the weights that the model holds."""
    return row.logp(model(row.ids).logits[0], temperature)


def _cache_name(model: Any) -> str:
    """What the model's forward calls its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _near(logp: Tensor, said: Tensor, bound: float) -> bool:
    return float((logp - said).abs().max()) <= bound


def _unnormalised(logp: Tensor, said: Tensor, top_p: float, bound: float) -> bool:
    """Whether `said` lies below `logp` by no more than the log of the mass that top-p keeps, and not by nothing."""
    over = logp - said
    return (
        bool((over >= -bound).all()) and bool((over <= -math.log(top_p) + bound).all()) and bool((over > bound).any())
    )


@contextlib.contextmanager
def _holding(model: Any, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within it the model's parameters of these names hold these values."""
    own = {n: p.data for n, p in model.named_parameters() if n in tensors}
    named = dict(model.named_parameters())
    try:
        for name in own:
            named[name].data = tensors[name]
        yield
    finally:
        for name, data in own.items():
            named[name].data = data


@contextlib.contextmanager
def _old_head(model: Any, before: dict[str, Tensor]) -> Iterator[bool | None]:
    """Within it the head alone holds the weights before; whether it is tied to the embedding. None: it did not move."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    own = None if head is None else head.weight
    name = next((n for n, p in model.named_parameters() if p is own), "")
    if name not in before:
        yield None
        return
    try:
        head.weight = nn.Parameter(before[name], requires_grad=False)
        yield own is embedding
    finally:
        head.weight = own
