"""How token terms become one number. Named for what they do; all are linear and use the minibatch's global totals.

``over="all"`` counts every trainable token, also those whose weight is 0; ``over="kept"`` only those of weight > 0;
`TokenMean` also takes ``over="weight"``, the sum of the weights. ``totals`` names the counts that a denominator comes
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kenpo.errors import InputError
from kenpo.ops.masked import count, divide
from kenpo.stages.base import Aggregate
from kenpo.types import Totals

Over = Literal["all", "kept"]


def _inverse(n: Tensor) -> Tensor:
    return divide(n.new_ones(()).expand_as(n), n)


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """1 / (tokens of the minibatch): every token weighs the same, long responses weigh more.

    ``over="weight"``: 1 / (sum of the weights), which renormalises soft weights.
    Source: DAPO, arXiv:2503.14476, as every framework implements it (the printed formula is `GroupTokenMean`).
    """

    over: Literal["all", "kept", "weight"] = "all"

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({{"all": "tokens", "kept": "kept_tokens", "weight": "weight_sum"}[self.over]})

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        if self.over == "weight":
            return mask * _inverse(totals.weight_sum)
        some, n = (kept, totals.kept_tokens) if self.over == "kept" else (mask, totals.tokens)
        return some * _inverse(n)


@dataclass(frozen=True)
class SequenceMean(Aggregate):
    """1 / (N · n_i): the mean over responses of each response's token mean. Every response weighs the same.

    N counts every selected response, fully masked ones too (``over="kept"``: those with a kept token;
    ``over="kept_tokens"``: n_i counts kept tokens, N everyone). Source: GRPO, arXiv:2402.03300.
    """

    over: Literal["all", "kept", "kept_tokens"] = "all"

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({"kept_sequences" if self.over == "kept" else "sequences"})

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        some = mask if self.over == "all" else kept
        n = totals.kept_sequences if self.over == "kept" else totals.sequences
        return some * (_inverse(count(some, n, -1)) * _inverse(n)).unsqueeze(-1)


@dataclass(frozen=True)
class SequenceSum(Aggregate):
    """1 / N: the mean over responses of each response's token sum.

    N counts every selected response, fully masked ones too (``over="kept"``: those with a kept token).
    Source: RLOO, LUSPO (arXiv:2602.05261).
    """

    over: Over = "all"

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({"kept_sequences" if self.over == "kept" else "sequences"})

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        if self.over == "kept":
            return kept * _inverse(totals.kept_sequences)
        return mask * _inverse(totals.sequences)


@dataclass(frozen=True)
class ContrastMean(Aggregate):
    """1 / (C · n_i): each response's token mean, summed over a group's responses; the mean over the C decided groups.

    For objectives that contrast the responses of a group and put the group's value in parts on them. A group without a
    decided outcome (`Surrogate.decided`) is not counted. Source: the common form of pairwise and group-wise losses.
    """

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({"contrasts"})

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        return mask * (_inverse(count(mask, totals.contrasts, -1)) * _inverse(totals.contrasts)).unsqueeze(-1)


@dataclass(frozen=True)
class FixedLength(Aggregate):
    """1 / (N · length): token sums over a constant, so that length has no effect on a token's weight.

    ``length`` in tokens, usually the response limit; it only rescales the learning rate, but it must be said: None is
    refused when the loss is evaluated. ``rows=False`` leaves N out: 1 / length (LUFFY's released script).
    Source: Dr. GRPO, arXiv:2503.20783 (released recipe: 3000).
    """

    length: int | None = None
    rows: bool = True

    def check(self) -> None:
        self.refuse(self.length is None or self.length > 0, f"length must be positive, got {self.length}")

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({"sequences"} if self.rows else ())

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        if self.length is None:
            raise InputError(
                "fixed_length.length is not set: give the response limit, e.g. --set aggregate.length=1024"
            )
        share = _inverse(totals.sequences) if self.rows else totals.sequences.new_ones(())
        return mask * (share / self.length)


@dataclass(frozen=True)
class GroupTokenMean(Aggregate):
    """1 / (P · tokens of the group): the mean over groups of each group's token mean.

    P counts groups with at least one selected response. Source: DAPO's objective as printed, arXiv:2503.14476, eq. 8.
    """

    over: Over = "all"

    @property
    def totals(self) -> frozenset[str]:
        return frozenset({"groups", "group_kept_tokens" if self.over == "kept" else "group_tokens"})

    def __call__(self, mask: Tensor, kept: Tensor, totals: Totals) -> Tensor:
        some, n = (kept, totals.group_kept_tokens) if self.over == "kept" else (mask, totals.group_tokens)
        return some * (_inverse(n) * _inverse(totals.groups)).unsqueeze(-1)
