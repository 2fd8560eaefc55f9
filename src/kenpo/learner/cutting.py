"""How a minibatch is cut for the model: rows of like length together, rows that share a prompt together, by tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kenpo.models import shared_prompt
from kenpo.models.passes import on_host
from kenpo.models.scorer import Scorer
from kenpo.types import Rollouts


class Unit(NamedTuple):
    """Rows that stay together: one, or some that share ``prompt`` tokens; ``width`` of their own, padding included."""

    rows: tuple[int, ...]
    prompt: int
    width: int

    @property
    def cost(self) -> int:
        """Tokens that run."""
        return self.prompt + len(self.rows) * self.width


def cut(
    scorer: Scorer, rollouts: Rollouts, rows: Iterable[int], prompts: Sequence[int], budget: int, ranks: int = 1
) -> list[list[list[int]]]:
    """`rows` as microbatches of every rank, equally many for each: a rank with less work has empty ones at the end.

    `prompts` are numbers of the batch's rows, equal where the prompt is the same. All ranks get the same answer.
    """
    found = units(rollouts, rows, budget, prompts if scorer.why_unshared() is None else None)
    return _evenly([microbatches(part, budget, scorer.padded is None) for part in deal(found, ranks)])


def cut_groups(
    scorer: Scorer, rollouts: Rollouts, rows: Iterable[int], prompts: Sequence[int], budget: int, ranks: int = 1
) -> list[list[list[int]]] | None:
    """`cut` into microbatches that hold whole groups, the rows of each group in a row; None if one has no room."""
    shared = scorer.why_unshared() is None
    found = group_units(rollouts, rows, prompts if shared else None)
    if any(u.cost > budget for u in found):
        return None
    return _evenly([microbatches(part, budget, scorer.padded is None) for part in deal(found, ranks, split=False)])


def _evenly(made: list[list[list[int]]]) -> list[list[list[int]]]:
    most = max(map(len, made))
    return [part + [[] for _ in range(most - len(part))] for part in made]


def units(rollouts: Rollouts, rows: Iterable[int], budget: int, prompts: Sequence[int] | None = None) -> list[Unit]:
    """`rows` as units, the costliest first. With `prompts`, rows with one prompt form a unit where that pays.

    A row's tokens are those the model has to read: what stands behind its last trainable token is none of them, and a
    row without trainable token has none. A family larger than the budget is split, each part with the prompt once.
    """
    befores, lengths = _sizes(rollouts)
    rows = list(rows)
    made: list[Unit] = []
    for family in _families(rows, lengths, prompts):
        family.sort(key=lambda r: (-lengths[r], r))
        prompt = befores[family[0]]
        width = lengths[family[0]] - prompt
        at_most = max(1, (budget - prompt) // max(1, width))
        if at_most == 1 and shared_prompt.saved(prompt, [lengths[r] for r in family]):
            warnings.warn(
                f"--microbatch-tokens {budget} holds no two samples with their prompt, which then runs once for each: "
                "exact but slower",
                stacklevel=2,
            )
        pieces = -(-len(family) // at_most)
        size = -(-len(family) // pieces)
        for part in (family[i : i + size] for i in range(0, len(family), size)):
            made += _unit(part, prompt, lengths)
    return sorted(made, key=lambda u: (-u.cost, u.rows))


def group_units(rollouts: Rollouts, rows: Iterable[int], prompts: Sequence[int] | None = None) -> list[Unit]:
    """`rows` as one unit a group, the costliest first; a prompt that all its rows share counts once where that pays."""
    befores, lengths = _sizes(rollouts)
    groups: dict[int, list[int]] = {}
    names = rollouts.group.tolist()
    for r in rows:
        groups.setdefault(names[r], []).append(r)
    made = []
    for members in groups.values():
        alike = prompts is not None and len({prompts[r] for r in members if lengths[r]}) == 1
        prompt = max(befores[r] for r in members) if alike else 0
        if not shared_prompt.saved(prompt, [lengths[r] for r in members]):
            prompt = 0
        made.append(Unit(tuple(members), prompt, max(lengths[r] for r in members) - prompt))
    return sorted(made, key=lambda u: (-u.cost, u.rows))


def _families(rows: list[int], lengths: Sequence[int], prompts: Sequence[int] | None) -> list[list[int]]:
    """Rows with one prompt; each by itself without `prompts`, and if there is nothing to read in it."""
    if prompts is None:
        return [[r] for r in rows]
    found: dict[tuple[bool, int], list[int]] = {}
    for r in rows:
        found.setdefault((True, prompts[r]) if lengths[r] else (False, r), []).append(r)
    return list(found.values())


def _unit(rows: Sequence[int], prompt: int, lengths: Sequence[int]) -> list[Unit]:
    if shared_prompt.saved(prompt, [lengths[r] for r in rows]):
        return [Unit(tuple(rows), prompt, max(lengths[r] for r in rows) - prompt)]
    return [Unit((r,), 0, lengths[r]) for r in rows]


def _sizes(rollouts: Rollouts) -> tuple[list[int], list[int]]:
    """Of every row the tokens before its last prompt token, and all that the model has to read; 0 where nothing is."""
    assert rollouts.tokens is not None
    mask = on_host(rollouts.mask)
    if not mask.size:
        return [0] * len(mask), [0] * len(mask)
    place = (on_host(rollouts.tokens) >= 0).cumsum(1)  # real tokens up to and with this one
    some, row = mask.any(1), np.arange(len(mask))
    first, last = mask.argmax(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    prompt = (place[row, first] - 2).clip(0)
    return (prompt * some).tolist(), ((place[row, last] - 1) * some).tolist()


def microbatches(found: Iterable[Unit], budget: int, packed: bool = False) -> list[list[int]]:
    """Rows of each microbatch: units of like length, at most `budget` tokens (a larger unit stands alone).

    Tokens of padding count, except where rows that share no prompt are `packed`.
    """
    buckets: list[tuple[list[int], int, int, int, int]] = []  # rows, prompts, widest prompt, widest row, tokens
    for unit in sorted(found, key=lambda u: (-u.prompt, -u.width, u.rows)):
        if buckets:
            rows, prompts, prompt, width, tokens = buckets[-1]
            wide = max(width, unit.width)
            if packed and not unit.prompt:
                tokens += unit.cost
            else:
                tokens = (prompts + 1) * prompt + (len(rows) + len(unit.rows)) * wide
            if bool(prompt) == bool(unit.prompt) and tokens <= budget:
                buckets[-1] = (rows + list(unit.rows), prompts + 1, prompt, wide, tokens)
                continue
        buckets.append((list(unit.rows), 1, unit.prompt, unit.width, unit.cost))
    return [rows for rows, *_ in buckets]


def deal(found: Sequence[Unit], ranks: int, split: bool = True) -> list[list[Unit]]:
    """Every rank's units: the costliest first, each to the rank with the fewest tokens so far.

    ``split``: where there are fewer units than ranks, rather a prompt twice than an idle rank.
    """
    if ranks > 1 and split and len(found) < ranks:
        found = [Unit((r,), 0, u.prompt + u.width) for u in found for r in u.rows]
    loads = [0] * ranks
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    for unit in found:
        to = loads.index(min(loads))
        loads[to] += unit.cost
        dealt[to].append(unit)
    return dealt
