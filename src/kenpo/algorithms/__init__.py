"""The catalogue: one file per algorithm, each a short declaration. Reading order, from the root outward."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from kenpo.algorithm import Algorithm
from kenpo.errors import unknown_name

#: Modules in reading order; every public `Algorithm` in them is catalogued.
READING_ORDER = (
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "remax",
    "ppo",
    "vapo",
    "rfpo",
    "spo",
    "ttrl",
    "ttpo",
    "gapo",
    "mad_rl",
    "rlcr",
    "gprl",
    "riskpo",
    "gspo",
    "luspo",
    "gmpo",
    "pmpo",
    "sapo",
    "sspo",
    "dhpo",
    "cispo",
    "gppo",
    "ripo",
    "minpro",
    "off_policy_grpo",
    "rspo",
    "luffy",
    "grin",
    "repo",
    "oc_grpo",
    "sft_mixture",
    "sis",
    "reco",
    "zcpo",
    "erpo",
    "tis",
    "mis",
    "icepop",
    "kpop",
    "dppo",
    "trm",
    "m2po",
    "stapo",
    "mini_rl",
    "opsm",
    "rejection",
    "stare",
    "gmc_grpo",
    "missing_old_logits",
    "graft",
    "range_grpo",
    "conspo",
    "ggpo",
    "sft",
    "reward_model",
    "dpo",
    "ipo",
    "simpo",
    "mdre",
    "opd",
    "opsa",
    "gkd",
    "minillm",
    "sdpo",
    "opsd",
    "teacher_mixed",
    "rlid",
)


def _declared() -> Iterator[tuple[ModuleType, Algorithm]]:
    """(module, algorithm) of every declaration; an algorithm belongs to the first module in which it stands."""
    seen: set[str] = set()
    for name in READING_ORDER:
        module = importlib.import_module(f"kenpo.algorithms.{name}")
        for value in vars(module).values():
            if isinstance(value, Algorithm) and value.name not in seen:
                seen.add(value.name)
                yield module, value


def catalogue() -> dict[str, Algorithm]:
    """Every catalogued algorithm by name, in reading order."""
    return {a.name: a for _, a in _declared()}


def module_of(name: str) -> ModuleType | None:
    """The module that declares the catalogued algorithm `name`; its docstring is the algorithm's page."""
    return next((m for m, a in _declared() if a.name == name), None)


def names() -> list[str]:
    """Names of the catalogued algorithms, in reading order."""
    return list(catalogue())


def get(name: str) -> Algorithm:
    """The catalogued algorithm of that name. Raises `UnknownNameError` that lists close matches."""
    found = catalogue()
    if name not in found:
        raise unknown_name("algorithm", name, found, "(your own: my.py:MINE)")
    return found[name]
