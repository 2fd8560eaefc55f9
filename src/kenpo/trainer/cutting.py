"""How a minibatch is cut for the model: rows of like length together, rows that share a prompt together, by tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kenpo.models import shared_prompt
from kenpo.ranks import Ranks
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


def units(rollouts: Rollouts, rows: Iterable[int], budget: int, share: bool) -> list[Unit]:
    """`rows` as units, the costliest first. ``share``: rows with one prompt form a unit where that pays.

    A row's tokens are those the model has to read: what stands behind its last trainable token is none of them, and a
    row without trainable token has none. A family larger than the budget is split, each part with the prompt once.
    """
    prompts, lengths = _sizes(rollouts)
    tokens = rollouts.tokens
    assert tokens is not None
    rows = list(rows)
    families: dict[bytes | int, list[int]] = {r: [r] for r in rows}
    if share:
        table, families = tokens.cpu().numpy(), {}
        for r in rows:
            real = table[r][table[r] >= 0]
            families.setdefault(real[: prompts[r] + 1].tobytes() if lengths[r] else r, []).append(r)
    made: list[Unit] = []
    for family in families.values():
        family.sort(key=lambda r: (-lengths[r], r))
        prompt = prompts[family[0]]
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


def _unit(rows: Sequence[int], prompt: int, lengths: Sequence[int]) -> list[Unit]:
    if shared_prompt.saved(prompt, [lengths[r] for r in rows]):
        return [Unit(tuple(rows), prompt, max(lengths[r] for r in rows) - prompt)]
    return [Unit((r,), 0, lengths[r]) for r in rows]


def _sizes(rollouts: Rollouts) -> tuple[list[int], list[int]]:
    """Of every row the tokens before its last prompt token, and all that the model has to read; 0 where nothing is."""
    assert rollouts.tokens is not None
    place = (rollouts.tokens >= 0).cumsum(1)  # real tokens up to and with this one
    any_, mask = rollouts.mask.any(1), rollouts.mask.int()
    if not mask.shape[1]:
        return [0] * len(mask), [0] * len(mask)
    first = mask.argmax(1, keepdim=True)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1, keepdim=True)
    prompt = (place.gather(1, first).squeeze(1) - 2).clamp_min(0)
    length = place.gather(1, last).squeeze(1) - 1
    return (prompt * any_).tolist(), (length * any_).tolist()


def microbatches(cut: Iterable[Unit], budget: int, packed: bool = False) -> list[list[int]]:
    """Rows of each microbatch: units of like length, at most `budget` tokens (a larger unit stands alone).

    Tokens of padding count, except where rows that share no prompt are `packed`.
    """
    buckets: list[tuple[list[int], int, int, int, int]] = []  # rows, prompts, widest prompt, widest row, tokens
    for unit in sorted(cut, key=lambda u: (-u.prompt, -u.width, u.rows)):
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


def deal(cut: Sequence[Unit], ranks: Ranks) -> list[Unit]:
    """This rank's units: the costliest first, each to the rank with the fewest tokens so far."""
    if ranks.size == 1:
        return list(cut)
    if len(cut) < ranks.size:  # fewer families than ranks: rather each prompt twice than an idle rank
        cut = [Unit((r,), 0, u.prompt + u.width) for u in cut for r in u.rows]
    loads = [0] * ranks.size
    mine = []
    for unit in cut:
        to = loads.index(min(loads))
        loads[to] += unit.cost
        if to == ranks.rank:
            mine.append(unit)
    return mine
