"""Divergences that a model pass must make: stages say which, two that want different ones in one field are refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import kenpo
from kenpo import stages as S
from kenpo.divergence import Divergence, Term
from kenpo.errors import IllegalCombinationError


@dataclass(frozen=True)
class Distil(S.Regularizer):
    """A divergence to a teacher."""

    weight: float = 0.5

    _needs = frozenset({"kl_teacher"})

    @property
    def terms(self):
        return (Term("kl_teacher", "teacher", Divergence("jsd", self.weight, top=20), temperature=2.0),)

    def __call__(self, ctx):
        return ctx.read("kl_teacher")


@dataclass(frozen=True)
class Follow(Distil):
    """The same field, with another divergence."""

    weight: float = 0.25


def test_a_stage_may_say_which():
    term = kenpo.get("gspo").but(regularizers=(Distil(),)).terms["kl_teacher"]
    assert (term.divergence, term.temperature) == (Divergence("jsd", 0.5, top=20), 2.0)


def test_two_kinds_in_one_field_are_refused():
    with pytest.raises(IllegalCombinationError, match="two stages want different kl_teacher"):
        kenpo.get("gspo").but(regularizers=(Distil(), Follow()))
    kenpo.get("gspo").but(regularizers=(Distil(), Follow(weight=0.5)))
