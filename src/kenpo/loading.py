"""Algorithms by name or from the user's own file: ``grpo``, ``my.py:MINE``, ``package.module:MINE``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kenpo.algorithm import Algorithm
from kenpo.algorithms import get
from kenpo.errors import InputError, unknown_name
from kenpo.order import evaluate
from kenpo.types import Policy, Rollouts


def load(spec: str) -> Algorithm:
    """The `Algorithm` named ``NAME`` in ``file.py:NAME`` or ``module:NAME``. The file runs as Python: load only your
    own.

    Raises `InputError` if the file is missing or fails, `UnknownNameError` if it has no such algorithm.
    """
    value, module = load_object(spec, "algorithm")
    if not isinstance(value, Algorithm):
        known = [n for n, v in vars(module).items() if isinstance(v, Algorithm)]
        where, _, name = spec.rpartition(":")
        raise unknown_name(f"algorithm in {where}", name, known or ["(none)"])
    return value


def load_object(spec: str, what: str) -> tuple[Any, Any]:
    """What ``NAME`` stands for in ``file.py:NAME`` or ``module:NAME``, and the module.

    An algorithm's name that stands for nothing gives None. ``what`` names its kind in messages. Raises `InputError` if
    the file is missing or fails, `UnknownNameError` if it has no such name.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError(f"{what} {spec!r}: expected FILE.py:NAME or MODULE:NAME")
    try:
        module = _from_file(Path(where), what) if where.endswith(".py") else importlib.import_module(where)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise InputError(f"{what} {spec!r}: {where} failed with {type(error).__name__}: {error}") from error
    if what != "algorithm" and not hasattr(module, name):
        raise unknown_name(f"{what} in {where}", name, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, name, None), module


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{what} file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(f"kenpo_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def resolve(spec: str, settings: Mapping[str, Any] | None = None, adding: Iterable[str] = ()) -> Algorithm:
    """An algorithm by name or file: slots emptied, then stages added (`adding`, snake-case names), then numbers set.

    The advantage's numbers come before the added stages: one of them (``both``) may allow what else is refused. A slot
    that is emptied and filled again in one call holds the added stages alone.
    """
    a, settings = load(spec) if ":" in spec else get(spec), dict(settings or {})
    emptied = {k: settings.pop(k) for k in list(settings) if "." not in k}
    first = {k: settings.pop(k) for k in list(settings) if k.startswith("advantage.")}
    a = a.with_settings(emptied | first) if emptied or first else a
    for name in adding:
        a = a.adding(name, settings)
    return a.with_settings(settings) if settings else a


def try_out(algorithm: Algorithm, spec: str, supplied: Collection[str]) -> None:
    """Run the user's own algorithm once on four made-up rollouts, so that a fault in it shows before a model loads.

    Raises `InputError` naming the exception. An algorithm that reads more than is `supplied` is not tried: whoever
    plans the run refuses it.
    """
    if not algorithm.needs <= set(supplied):
        return
    mask = torch.tensor([[False, True, True, True]] * 4)
    logp = torch.full(mask.shape, -1.0) - 0.1 * torch.arange(4)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    rollouts = Rollouts(
        mask=mask, group=torch.tensor([0, 0, 1, 1]), rewards=rewards,
        reward_parts=dict.fromkeys(getattr(algorithm.advantage, "parts", None) or ("part",), rewards),
        tokens=torch.arange(16).reshape(4, 4), prompt_id=torch.tensor([0, 0, 1, 1]), answer=torch.tensor([0, 1, 0, 1]),
        truncated=torch.zeros(4, dtype=torch.bool), logp_sampler=logp, logp_old=logp + 0.1, logp_ref=logp - 0.1,
    )  # fmt: skip
    policy = Policy(logp, entropy=torch.full(mask.shape, 1.0), kl_ref=torch.full(mask.shape, 0.1))
    try:
        result = evaluate(algorithm, rollouts, policy)
    except Exception as error:  # whatever the user's stage raises
        raise InputError(f"algorithm {spec!r} fails on a small batch: {type(error).__name__}: {error}") from error
    if not bool(result.coefficients.isfinite().all()):
        raise InputError(f"algorithm {spec!r} gives NaN or infinite coefficients on a small batch of ordinary numbers")
