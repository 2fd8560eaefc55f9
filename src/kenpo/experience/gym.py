"""Tasks made by reasoning_gym: any of its datasets, each problem from a seed of its own."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from typing import Any

from kenpo.errors import InputError, RunError, unknown_name
from kenpo.experience.files import EVAL_ID_OFFSET, prompt_key
from kenpo.experience.pool import Pool, Workers
from kenpo.experience.problem import Problem
from kenpo.experience.rows import MISSING_PACKAGE

HELD_OUT_ONE_IN = 5  # share of the prompts, by content, that is held out
_MAKE_LIMIT = 60.0  # seconds for one problem
_ATTEMPTS = 400  # draws in a row from the wrong side before a dataset counts as having too few problems


class GymTask:
    """An endless stream of one reasoning_gym dataset, with its scorer as verifier and its default system prompt.

    Problem `index` is made from a seed hashed from (`seed`, `index`), so it needs no state and no list. A digest of
    the prompt decides the side: about one prompt in five is held out, whatever the seed. Raises UnknownNameError for
    a dataset that does not exist and InputError without the package.
    """

    verifier = "reasoning_gym"

    def __init__(self, name: str, *, seed: int = 0, system: str | None = None) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise InputError(f"task reasoning_gym:{name} needs the package reasoning_gym: {MISSING_PACKAGE}")
        catalogue = _ask(name, {"catalogue": True})
        known = [key for key in catalogue["datasets"] if key != "composite"]  # a mixture without problems of its own
        if name not in known:
            raise unknown_name("reasoning_gym dataset", name, known)
        self.dataset = name
        self.name = f"reasoning_gym:{name}"
        self.seed = seed
        self.system: str | None = catalogue["system"] if system is None else system

    @property
    def ids(self) -> None:
        """None: the stream is endless."""
        return None

    @property
    def size(self) -> None:
        """None: the stream is endless."""
        return None

    def problem(self, id: int) -> Problem:
        """The problem of that id, which is its index in the stream."""
        return self.train(id)

    def train(self, index: int) -> Problem:
        """The `index`-th (from 0) problem of the stream."""
        if index < 0:
            raise InputError(f"{self.name}: problem index {index} is negative; the first one is 0")
        for attempt in range(_ATTEMPTS):
            problem = self._make(_seed("train", self.seed, index, attempt), index)
            if not _is_held_out(problem):
                return problem
        raise InputError(f"{self.name}: no problem left to train on; the dataset has too few different ones")

    def heldout(self, n: int) -> list[Problem]:
        """The first `n` different problems of the held-out side (fewer if the dataset has fewer)."""
        if n < 1:
            raise InputError(f"{self.name}: asked for {n} held-out problems; ask for at least 1")
        found: dict[bytes, Problem] = {}
        misses = draw = 0
        while len(found) < n and misses < _ATTEMPTS:
            problem = self._make(_seed("heldout", draw), EVAL_ID_OFFSET + draw)
            key = prompt_key(problem.prompt)
            draw, misses = draw + 1, misses + 1
            if _is_held_out(problem) and key not in found:
                found[key], misses = problem, 0
        if not found:
            raise InputError(f"{self.name}: no problem is held out; the dataset has too few different ones")
        return list(found.values())

    def _make(self, seed: int, number: int) -> Problem:
        entry = _ask(self.dataset, {"make": True, "dataset": self.dataset, "seed": seed})
        extra = {"reasoning_gym": {"dataset": self.dataset, "seed": seed}}
        return Problem(id=number, prompt=entry["question"], answer=entry["answer"], extra=extra)


@functools.cache
def _maker() -> Pool:
    """One worker for all tasks. With its fixed hash seed a generator that iterates over sets makes the same problems
    in every run, and one that hangs can be ended."""
    return Pool({"kind": "reasoning_gym"}, Workers(count=1, time_limit=_MAKE_LIMIT))


def _ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = _maker().run([request])[0]
    if "detail" in answer:
        raise RunError(f"task reasoning_gym:{name}: the package failed to make a problem: {answer['detail']}")
    return answer


def _is_held_out(problem: Problem) -> bool:
    return int.from_bytes(prompt_key(problem.prompt)[:8], "big") % HELD_OUT_ONE_IN == 0


def _seed(*words: object) -> int:
    text = "/".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
