"""The plain-Python reference of every catalogued algorithm, with what it needs beside the case."""

from __future__ import annotations

from functools import partial

from reference import REFERENCES, WIDER, numbers

import kenpo
from laws.build import tensors
from laws.catalogue import SETTINGS

#: Their references also give the slopes of values and entropy.
CRITICS = ("ppo", "ppo-ptx", "vapo", "rfpo")


def _sis(case, **given):
    """The draws are ours: the reference takes them as random numbers."""
    ratio = kenpo.get("sis").ratio
    rollouts, policy = tensors(case)
    ctx = kenpo.stages.Context(rollouts, kenpo.select(kenpo.get("sis"), rollouts), policy)
    return WIDER["sis"](case, ratio.draws(ctx).tolist(), **given)


def _luffy(case, length, **more):
    return WIDER["luffy"](case, width=length, **more)


def _slopes_apart(f):
    """The reference without its fifth item: d loss / d values and d loss / d entropy, asserted by tests of their
    own."""
    return lambda case, **given: f(case, **given)[:4]


ALL = (
    REFERENCES
    | {n: f for n, f in WIDER.items() if n not in ("sis", "luffy", *CRITICS)}
    | {n: _slopes_apart(WIDER[n]) for n in CRITICS}
    | {"sis": _sis, "luffy": _luffy, "luffy-known": partial(_luffy, behaviour="logp_sampler")}
)
#: Their references state no advantages: the objective has none.
WITHOUT_ADVANTAGES = {"conspo", "ggpo"}


def reference(name: str, case: dict) -> tuple:
    """(loss, coefficients, advantages, weights[, slopes of other fields by name]) under the laws' settings."""
    return ALL[name](case, **numbers(SETTINGS.get(name, {})))
