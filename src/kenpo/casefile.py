"""CASE files of `kenpo loss`: recorded numbers in JSON, evaluated in float64."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenpo.algorithm import Algorithm
from kenpo.errors import InputError, KenpoError, unknown_name
from kenpo.jsonfile import read_json
from kenpo.loading import resolve
from kenpo.order import evaluate
from kenpo.types import POLICY_FIELDS, ROLLOUT_FIELDS, FieldSpec, Policy, Result, Rollouts

_DTYPES = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


def _tensor(name: str, value: Any, spec: FieldSpec) -> Tensor:
    def number(x: Any) -> Any:
        if isinstance(x, list):
            return [number(y) for y in x]
        if x is None and spec.kind == "float":
            return math.nan
        if isinstance(x, int | float) and not isinstance(x, str):
            return x
        raise InputError(f"{name}: {x!r} is not a number")

    if not isinstance(value, list):
        raise InputError(f"{name}: expected a list of {len(spec.axes)} axes [{','.join(spec.axes)}]")
    try:
        raw = torch.tensor(number(value), dtype=torch.float64)
    except InputError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise InputError(f"{name}: rows have different lengths or depths; pad them to one width") from None
    if value == [] or raw.numel() == 0:
        raw = raw.reshape([*raw.shape, *[0] * (len(spec.axes) - raw.dim())])
    if spec.kind == "float":
        return raw
    if not bool((raw == raw.round()).all()):  # also false for NaN
        raise InputError(f"{name}: expected whole numbers")
    if spec.kind == "bool" and not bool(((raw == 0) | (raw == 1)).all()):
        raise InputError(f"{name}: holds values other than 0 and 1")
    if spec.kind == "int" and raw.numel() and float(raw.abs().max()) >= 2**53:  # float64 may have rounded it
        try:
            return torch.tensor(value, dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError, OverflowError):
            raise InputError(f"{name}: a number does not fit into 64 bits") from None
    return raw.to(_DTYPES[spec.kind])


def _fields(kind: str, raw: Any, specs: Mapping[str, FieldSpec]) -> dict[str, Tensor]:
    if not isinstance(raw, dict):
        raise InputError(f"{kind}: expected an object of fields")
    for name in raw:
        if name not in specs:
            raise unknown_name(f"field of {kind}", name, specs)
    return {n: _tensor(f"{kind}.{n}", v, specs[n]) for n, v in raw.items()}


def rollouts_from(raw: Any) -> Rollouts:
    """`Rollouts` in float64 from a JSON object. ``null`` in a float field is NaN (a reward without a verdict)."""
    raw = dict(raw) if isinstance(raw, dict) else raw
    parts = raw.pop("reward_parts", {}) if isinstance(raw, dict) else {}
    if not isinstance(parts, dict):
        raise InputError("rollouts.reward_parts: expected an object of named lists")
    fields = _fields("rollouts", raw, ROLLOUT_FIELDS)
    missing = [n for n in ("mask", "group", "rewards") if n not in fields]
    if missing:
        raise InputError(f"rollouts.{missing[0]} is missing; mask, group and rewards are required")
    named = {n: _tensor(f"rollouts.reward_parts.{n}", v, FieldSpec("B", "float")) for n, v in parts.items()}
    return Rollouts(**fields, reward_parts=named, contexts={})


def policy_from(raw: Any) -> Policy:
    """`Policy` in float64 from a JSON object; ``logp`` is required."""
    fields = _fields("policy", raw, POLICY_FIELDS)
    if "logp" not in fields:
        raise InputError("policy.logp is missing; give the policy's log-probs [B,T]")
    return Policy(**fields)


def _no_misspelling(found: Iterable[str], names: Sequence[str]) -> None:
    """`UnknownNameError` for a key that is almost one that is read; others are the writer's own notes."""
    for name in found:
        near = name.strip().lower() in (*names, "set") or difflib.get_close_matches(
            name.lower(), names, n=1, cutoff=0.75
        )
        if name not in names and near:
            raise unknown_name("key", name, names)


def run_case(a: Algorithm, case: Any) -> Result:
    """Evaluate `a` on one case object of a CASE file."""
    if not isinstance(case, dict) or not {"rollouts", "policy"} <= case.keys():
        raise InputError("expected an object with 'rollouts' and 'policy'")
    _no_misspelling(case, ("rollouts", "policy"))
    return evaluate(a, rollouts_from(case["rollouts"]), policy_from(case["policy"]))


def as_json(result: Result) -> dict[str, Any]:
    """A `Result` as plain JSON values; a metric without data is null."""
    metrics = {k: (v if math.isfinite(v) else None) for k, v in result.metrics.items()}
    out = {
        "loss": float(result.loss.detach()),
        "coefficients": result.coefficients.tolist(),
        "advantages": result.advantages.tolist(),
        "weights": result.weights.tolist(),
        "metrics": metrics,
    }
    others = {n: g.tolist() for n, g in result.gradients.items() if n != "logp"}
    return out | ({"gradients": others} if others else {})


def run_file(path: str | Path) -> dict[str, Any]:
    """Evaluate every case of a CASE file. Errors name the file, the case and the field."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("algorithm"), str):
        raise InputError(f"{path}: expected an object with 'algorithm' (a name) and 'cases' (a list)")
    try:
        _no_misspelling(document, ("algorithm", "settings", "with", "cases"))
    except InputError as error:
        raise type(error)(f"{path}: {error}") from None
    cases, settings = document.get("cases"), document.get("settings", {})
    if not isinstance(cases, list) or not cases:
        raise InputError(f"{path}: 'cases' must be a list with at least one case")
    if not isinstance(settings, dict):
        raise InputError(f"{path}: 'settings' must be an object of dotted keys")
    adding = document.get("with", [])
    if not isinstance(adding, list) or not all(isinstance(name, str) for name in adding):
        raise InputError(f"{path}: 'with' must be a list of stage names")
    try:
        a = resolve(document["algorithm"], settings, adding)
    except KenpoError as error:
        raise type(error)(f"{path}: {error}") from None
    results = []
    for k, case in enumerate(cases):
        try:
            results.append(as_json(run_case(a, case)))
        except KenpoError as error:
            raise type(error)(f"{path}: case {k}: {error}") from None
    return {"results": results}
