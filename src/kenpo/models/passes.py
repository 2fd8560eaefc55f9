"""The one function that calls a module, and the rows that it runs.

Rows are compacted before a model sees them: the real tokens of each row move to the left in their order, and whatever
is left over at the right is never attended to by a causal model. So positions count real tokens only, left and right
padding give the same arithmetic, and no attention mask is needed. What is laid out here is laid out on the host, from
tokens and mask that lie there; it goes to the model's device without waiting for it.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kenpo.errors import InputError, MissingFieldError
from kenpo.types import Rollouts


def call(
    module: Any, ids: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None, cache: Any = None
) -> Tensor:
    """Run a module over ids [R,S]: the states [R,S,H] of a decoder, or the logits [R,S,V] of a whole model.

    Without `positions` [R,S] they count from 0. `mask` [R, past + S] is false at keys of padding (None: there are
    none). `cache` holds earlier tokens and takes up these. Every model pass in scoring and training goes through here.
    """
    accepted = accepted_arguments(module)
    inputs: dict[str, Any] = {"input_ids": ids}
    if positions is not None:
        inputs["position_ids"] = positions
    elif "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(ids)
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    if cache is not None:
        inputs[cache_name(module)] = cache
    if "use_cache" in accepted:
        inputs["use_cache"] = cache is not None
    out = module(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def cache_name(module: Any) -> str:
    """The argument that takes a cache."""
    return "cache" if "cache" in accepted_arguments(module) else "past_key_values"


def module_inputs(module: Any, ids: Tensor) -> dict[str, Any]:
    """Arguments for a plain forward over left-aligned ids: positions count from 0, no cache."""
    accepted = accepted_arguments(module)
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs


def accepted_arguments(module: Any) -> frozenset[str]:
    """Names of the arguments of a module's forward, looked up through decorators and adapters.

    Where it takes any keyword, ``use_cache`` counts as accepted: some families read it from there only.
    """
    parameters = inspect.signature(base_of(module).forward).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | ({"use_cache"} if anything else frozenset())


def base_of(model: Any) -> Any:
    """The transformers model inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def on_host(x: Tensor) -> np.ndarray:
    """A tensor's numbers as numpy has them; a copy only where it lies on another device."""
    return x.detach().cpu().numpy()


def to_device(x: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`x` on `device`, without waiting for what runs there."""
    tensor = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    return tensor.to(device, non_blocking=True)


class Rows(NamedTuple):
    """Rows with trainable tokens, moved to the left.

    ``ids`` [R,W] are the inputs; ``row``, ``column`` [N] the places of the targets in the batch as given;
    ``source_row``, ``source`` [N] the places in `ids` whose outputs predict the ``target`` [N]; ``batch_row`` [R] says
    which row of the batch each is. These lie on the model's device. On the host lie, for each of the R rows, the tokens
    that run (``lengths``), those before its last prompt token (``first``) and its row of the batch (``places``), and
    for each of the B rows of the batch its targets (``counts``).
    """

    ids: Tensor
    row: Tensor
    column: Tensor
    source_row: Tensor
    source: Tensor
    target: Tensor
    batch_row: Tensor
    lengths: list[int]
    first: list[int]
    places: list[int]
    counts: list[int]


def compact(
    rollouts: Rollouts, device: torch.device, context: int | None, vocabulary: int, ends: bool = False
) -> Rows | None:
    """The rows that a model has to run, checked; None without a trainable token.

    What stands behind a row's last prediction is not run; with `ends` its last trainable token is. ``prompt_mask``
    names tokens of the prompt that are scored as well. Raises `InputError` for a trainable position without token or
    predecessor, ids outside the vocabulary, and rows beyond the context.
    """
    if rollouts.tokens is None:
        raise MissingFieldError("tokens: the batch holds none, so the model can't score it")
    tokens, mask = on_host(rollouts.tokens), on_host(rollouts.mask)
    if rollouts.prompt_mask is not None:
        mask = mask | (on_host(rollouts.prompt_mask) & mask.any(1, keepdims=True))
    row, column = mask.nonzero()
    if not len(row):
        return None
    present = tokens >= 0
    place = present.cumsum(1) - 1  # position among the row's real tokens
    target, source = tokens[row, column], place[row, column] - 1
    _check_targets(row, column, target, source)
    kept = np.asarray(mask.any(1))
    index = kept.cumsum() - 1
    counts = mask.sum(1)
    bounds = counts[kept].cumsum()
    first, lengths = source[bounds - counts[kept]], source[bounds - 1] + 1 + ends
    width = int(lengths.max())
    if context is not None and width > context:
        raise InputError(f"tokens: a row of {width} tokens exceeds the model's context of {context}")
    check_vocabulary("tokens", tokens, vocabulary)
    ids = np.zeros((int(kept.sum()), width), dtype=np.int64)
    used_row, used_column = (present & kept[:, None] & (place < width)).nonzero()
    ids[index[used_row], place[used_row, used_column]] = tokens[used_row, used_column]
    places = np.flatnonzero(kept)
    laid = [to_device(x, device) for x in (ids, row, column, index[row], source, target, places)]
    on_the_host = (lengths.tolist(), first.tolist(), places.tolist(), counts.tolist())
    return Rows(*laid, *on_the_host)  # type: ignore[call-arg, arg-type]


def _check_targets(row: np.ndarray, column: np.ndarray, target: np.ndarray, source: np.ndarray) -> None:
    bad = (target < 0) | (source < 0)
    if bad.any():
        at = int(bad.nonzero()[0][0])
        why = "holds no token" if int(target[at]) < 0 else "is the row's first token, so nothing predicts it"
        raise InputError(f"tokens: row {int(row[at])} position {int(column[at])} is trainable but {why}")


def check_vocabulary(name: str, ids: np.ndarray, vocabulary: int) -> None:
    """InputError for an id that the model has no embedding for."""
    if ids.size and int(ids.max()) >= vocabulary:
        raise InputError(f"{name}: id {int(ids.max())} is outside the model's vocabulary of {vocabulary}")


def prompt_keys(rollouts: Rollouts) -> list[int]:
    """A number for each row: rows with equal numbers have the same prompt, every token before the first trainable one.

    They are the batch's ``prefix`` where its maker said them; else found by the tokens, meant to be asked once for a
    batch and carried on by whoever cuts it.
    """
    if rollouts.tokens is None:
        raise MissingFieldError("tokens: the batch holds none, so the model can't score it")
    if rollouts.prefix is not None:
        return list(rollouts.prefix.tolist())
    tokens, mask = on_host(rollouts.tokens), on_host(rollouts.mask)
    if not mask.shape[1]:
        return list(range(len(mask)))
    names: dict[bytes, int] = {}
    first = np.where(mask.any(1), mask.argmax(1), mask.shape[1])
    return [names.setdefault(t[:n][t[:n] >= 0].tobytes(), len(names)) for t, n in zip(tokens, first, strict=True)]
