"""A sampler that differs from the trainer in a known way, so that corrections of a mismatch have one to correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kenpo.engines.base import Done, Engine, Request, SamplingOptions, Weights
from kenpo.engines.hf import HFEngine
from kenpo.episode import Episode
from kenpo.errors import InputError


class NoisyEngine(Engine):
    """`HFEngine` that samples in bfloat16 (``bf16``), or at another temperature (``temperature=X``), and tells the
    log-probs of what it really drew from. Greedy requests are left to the engine as it is.

    ``bf16``: the trained parameters are rounded while it samples, and its arithmetic is bfloat16. ``temperature=X``:
    requests' own temperature gives way to X. Tests and benchmarks need that; nobody else does. InputError for another
    word, and for bf16 where the model is bfloat16 already.
    """

    def __init__(self, inner: HFEngine, noise: str) -> None:
        self.inner = inner
        self.temperature = parse_noise(noise)
        dtype = next(inner.model.parameters()).dtype
        if self.temperature is None and dtype == torch.bfloat16:
            raise InputError("--sampler-noise bf16: the model is bfloat16 already, so that would change nothing")

    @property
    def version(self) -> int:
        """Of the weights that sample."""
        return self.inner.version

    @version.setter
    def version(self, value: int) -> None:
        self.inner.version = value

    def update(self, weights: Weights, version: int) -> None:
        """As the engine within."""
        self.inner.update(weights, version)

    def sample(self, requests: Sequence[Request], done: Done | None = None) -> list[Episode]:
        """Sampled requests with the noise, greedy ones without."""
        found: dict[int, Episode] = {}
        for greedy in (False, True):
            places = [i for i, r in enumerate(requests) if r.greedy is greedy]
            if not places:
                continue

            def told(i: int, episode: Episode, places: list[int] = places) -> None:
                if done is not None:
                    done(places[i], episode)

            run = self.inner.sample if greedy else self._noisy
            found |= dict(zip(places, run([requests[i] for i in places], told), strict=True))
        return [found[i] for i in range(len(requests))]

    def _noisy(self, requests: Sequence[Request], done: Done) -> list[Episode]:
        if self.temperature is not None:
            hot = [dataclasses.replace(r, options=self._at(r)) for r in requests]
            return self.inner.sample(hot, done)
        floats = [p for p in self.inner.model.parameters() if p.is_floating_point()]
        own = [p.data for p in floats]
        try:
            for p in floats:
                p.data = p.data.bfloat16()
            return self.inner.sample(requests, done)
        finally:
            for p, data in zip(floats, own, strict=True):
                p.data = data

    def _at(self, request: Request) -> SamplingOptions:
        assert self.temperature is not None
        return dataclasses.replace(request.options, temperature=self.temperature)


def parse_noise(noise: str) -> float | None:
    """The temperature of ``temperature=X``, None for ``bf16``. InputError for anything else."""
    name, _, value = noise.partition("=")
    if noise == "bf16":
        return None
    try:
        temperature = float(value)
    except ValueError:
        temperature = 0.0
    if name != "temperature" or not temperature > 0:
        raise InputError(f"--sampler-noise {noise}: bf16, or temperature=X with X above 0, expected")
    return temperature
