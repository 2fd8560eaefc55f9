"""Which divergence between a student and a teacher: the records that a stage, a model's head and an op agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kenpo.errors import InputError

#: The Jensen-Shannon weight is 0, 1 or at least this far from both: close to an end it is a learning rate.
EDGE = 0.01


@dataclass(frozen=True)
class Divergence:
    """Which divergence, on which support.

    ``kind`` "forward": KL(q‖p), covers the teacher's modes; "reverse": KL(p‖q), seeks one; "jsd": ``b KL(q‖m) + (1−b)
    KL(p‖m)``, ``m = b q + (1−b) p``, b = ``weight``, which is by definition the forward KL at b = 0 and the reverse at
    b = 1 (GKD, arXiv:2306.13649). JSD(b) itself tends to 0 at both ends, so 0 < b < .01 and .99 < b < 1 are refused.

    ``top`` K: only the K likeliest tokens of ``owner`` ("student" or "teacher") are told apart (None, or K ≥ V: all).
    ``rest``: "tail" puts the others into one bucket, a true divergence, never above the full one; "renormalised"
    compares conditional on the support; "generalised" adds Q − P (reverse) or P − Q (forward), P and Q the masses of
    the support, which keeps it ≥ 0 and its gradient that of the full sum's terms. The bare truncated sum is no
    divergence (it falls when the support is emptied) and is not offered.

    ``clip``: each summand of the forward KL is cut from above there (OPSD's code); the sum may then be negative.
    """

    kind: Literal["forward", "reverse", "jsd"] = "jsd"
    weight: float = 0.5
    top: int | None = None
    owner: Literal["student", "teacher"] = "student"
    rest: Literal["tail", "renormalised", "generalised"] = "tail"
    clip: float | None = None

    def __post_init__(self) -> None:
        known = {"kind": ("forward", "reverse", "jsd"), "owner": ("student", "teacher"),
                 "rest": ("tail", "renormalised", "generalised")}  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise InputError(f"divergence.{name}: {getattr(self, name)!r} is not one of {', '.join(values)}")
        b = self.weight
        if not (b in (0.0, 1.0) or EDGE <= b <= 1 - EDGE):
            raise InputError(
                f"divergence.weight: {b} is neither 0, 1 nor within [{EDGE}, {1 - EDGE}]; near an end the "
                "Jensen-Shannon divergence tends to 0 and the weight is a learning rate: use 0 for KL(teacher‖student) "
                "or 1 for KL(student‖teacher)"
            )
        if self.top is not None and self.top < 1:
            raise InputError(f"divergence.top: {self.top} tokens; give at least 1, or None for the whole vocabulary")
        if self.clip is not None and (self.direction != "forward" or self.top is not None):
            raise InputError("divergence.clip: cuts summands of the forward KL over the whole vocabulary only")

    @property
    def direction(self) -> str:
        """`kind` with the ends of "jsd" resolved: "forward", "reverse" or "jsd"."""
        return {0.0: "forward", 1.0: "reverse"}.get(self.weight, "jsd") if self.kind == "jsd" else self.kind


class Term(NamedTuple):
    """A policy field that a stage asks of the models: ``name`` of the field, ``of`` which other model it is measured
    against, by which ``divergence``, both models' logits divided by ``temperature``."""

    name: str
    of: str
    divergence: Divergence
    temperature: float = 1.0
